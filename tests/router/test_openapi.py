"""The API's own description is true: requests made from it get no 5xx, and answers as it says."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks

from medha_router.openai_requests import KINDS
from medha_router.openapi import document, page

from .conftest import MODEL, Router, Script, ScriptedReplica

DESCRIBED = document("0")
API = schemathesis.openapi.from_dict(DESCRIBED)
load_all_checks()
TRUE = [
    CHECKS.get_one(name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    )
]


def fuzz(router: Router, path: str, method: str, examples: int) -> None:
    def adjust(case: Any) -> Any:
        if isinstance(case.body, dict):
            case.body["model"] = MODEL  # else nearly all of them would name an unknown model
            case.body.pop("service_tier", None)
            case.body.pop("n", None)
            for name in (
                "prompt_logprobs",
                "echo",
            ):  # the scripted replica has no log-probabilities of prompts
                case.body.pop(name, None)
        return case

    @given(case=API[path][method].as_strategy().map(adjust))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        case.call_and_validate(base_url=router.url, checks=TRUE)

    run()


OPERATIONS = [(path, method.upper()) for path, methods in DESCRIBED["paths"].items() for method in methods]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_requests_made_from_the_description_get_answers_that_it_describes(
    router: Router, replica: ScriptedReplica, path: str, method: str
) -> None:
    replica.script = Script(tokens=replica.script.tokens[:3], logprobs=True)
    fuzz(router, path, method, 12)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_many_requests_made_from_the_description_get_answers_that_it_describes(
    router: Router, replica: ScriptedReplica, path: str, method: str
) -> None:
    replica.script = Script(tokens=replica.script.tokens[:3], logprobs=True)
    fuzz(router, path, method, 1000)


def test_the_document_is_served_and_names_every_field_that_is(router: Router) -> None:
    served = router.http.get("/openapi.json").json()
    assert served["paths"] == DESCRIBED["paths"]
    for path, kind in KINDS.items():
        assert (
            served["components"]["schemas"][kind.__name__]["properties"].keys() == kind.model_fields.keys()
        ), path


def test_the_page_shows_every_path_and_loads_nothing_from_elsewhere(router: Router) -> None:
    answer = router.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in DESCRIBED["paths"]:
        assert path.replace("{", "{") in answer.text
    assert "://" not in page(DESCRIBED)
    assert "src=" not in answer.text

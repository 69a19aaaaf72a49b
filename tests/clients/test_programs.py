"""Clients of other projects, unchanged, run programs against `medha up`: each check of a program must hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .conftest import Client

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("openai", "openai_program.py"),
        ("openai-node", "openai_node_program.mjs"),
        ("langchain-openai", "langchain_program.py"),
        ("litellm", "litellm_program.py"),
        ("instructor", "instructor_program.py"),
        ("llama-index", "llama_index_program.py"),
        ("haystack", "haystack_program.py"),
        ("pydantic-ai", "pydantic_ai_program.py"),
        ("openai-agents", "openai_agents_program.py"),
    ],
)
def test_a_client_gets_what_its_own_documentation_promises(
    client: Callable[[str], Client], name: str, program: str
) -> None:
    client(name).run_program(program)

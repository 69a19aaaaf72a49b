"""Write the files of the chart that are made from other files: `python charts/generate.py`, run by `make gen`.

- files/rights.yaml from what the operator says that it may do;
- templates/crds/ from crds/, with the label and the annotations that let Helm upgrade and keep them;
- the table of values in README.md, and the descriptions in values.schema.json, from the comments in values.yaml;
- what values.schema.json requires, from the defaults in values.yaml.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from medha_operator import rbac_rules
from medha_operator.operator_settings import OperatorSettings

CHART = Path(__file__).resolve().parent / "medha"
CRDS = Path(__file__).resolve().parents[1] / "crds"
_KEY = re.compile(r"( *)([A-Za-z]\w*):")
_BEGIN, _END = "<!-- values: written by `make gen` -->", "<!-- end of values -->"


@dataclass(frozen=True)
class Value:
    """A documented key of values.yaml."""

    path: str
    meaning: str
    default: Any


def values() -> list[Value]:
    """Return every key that a `# --` comment describes, in the order of the file."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    return [Value(path, meaning, _at(defaults, path)) for path, meaning in _described(text.splitlines())]


def _described(lines: list[str]) -> Iterator[tuple[str, str]]:
    above: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in lines:
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = [stripped[5:]]
        elif stripped.startswith("# ") and comment:
            comment.append(stripped[2:])
        elif found := _KEY.match(line):
            indent, name = len(found[1]), found[2]
            above = [(depth, key) for depth, key in above if depth < indent] + [(indent, name)]
            if comment:
                yield ".".join(key for _, key in above), " ".join(comment)
            comment = []


def _at(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document[name]
    return document


def readme(before: str) -> str:
    """Return README.md with a new table."""
    rows = ["| Value | Default | Meaning |", "|---|---|---|"]
    for value in values():
        default = json.dumps(value.default).replace("|", r"\|")
        rows.append(f"| `{value.path}` | `{default}` | {value.meaning} |")
    head, _, rest = before.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return f"{head}{_BEGIN}\n\n" + "\n".join(rows) + f"\n\n{_END}{tail}"


def schema(before: str) -> str:
    """Return values.schema.json with the descriptions of values.yaml, and with all values required that have a default.

    Helm removes what is set to null before it reads the schema. A required value is then refused by name; without that,
    templates would fail inside of what is missing.
    """
    document = json.loads(before)
    required: dict[str, dict[str, None]] = {}
    for value in values():
        parents = value.path.split(".")[:-1]
        if value.default is not None:
            for depth, name in enumerate(value.path.split(".")):
                required.setdefault(".".join(parents[:depth]), {})[name] = None
        _schema_node(document, value.path)["description"] = value.meaning
    for path, names in required.items():
        _schema_node(document, path)["required"] = list(names)
    return json.dumps(document, indent=2) + "\n"


def _schema_node(document: Any, path: str) -> Any:
    for name in path.split(".") if path else []:
        document = document["properties"][name]
    return document


def crd_templates() -> dict[str, str]:
    """Return file name in templates/crds/ -> definition that Helm installs, upgrades and, by default, keeps."""
    return {
        file.name: _crd_template(file.read_text(encoding="utf-8")) for file in sorted(CRDS.glob("*.yaml"))
    }


def _crd_template(text: str) -> str:
    assert "{{" not in text, "Helm would read it as an action"
    head, rest = text.split("\nmetadata:\n", 1)
    name, _, rest = re.split(r"\n  labels:\n|\nspec:\n", rest, maxsplit=2)
    ours = '    {{- include "medha.labels" (dict "root" . "component" "crds") | nindent 4 }}'
    annotations = (
        "  {{- if or .Values.crds.keep .Values.crds.annotations }}\n"
        "  annotations:\n"
        "    {{- if .Values.crds.keep }}\n"
        "    helm.sh/resource-policy: keep\n"
        "    {{- end }}\n"
        "    {{- with .Values.crds.annotations }}\n"
        "    {{- toYaml . | nindent 4 }}\n"
        "    {{- end }}\n"
        "  {{- end }}"
    )
    return (
        "{{- if .Values.crds.install }}\n"
        f"{head}\nmetadata:\n{name}\n{annotations}\n  labels:\n{ours}\nspec:\n{rest}"
        "{{- end }}\n"
    )


def rules() -> str:
    """Return files/rights.yaml: the rules of the operator's roles that no value changes, and those of each gang scheduler."""
    apis = get_args(OperatorSettings.model_fields["gang_apis"].annotation)[0]
    document = {
        "cluster": rbac_rules.cluster_rules(),
        "namespaced": rbac_rules.namespaced_rules(),
        "gang": {api: rbac_rules.gang_rules(OperatorSettings(gang_apis=(api,))) for api in get_args(apis)},
    }
    head = "# Written by `make gen` from operator/medha_operator/rbac_rules.py; change it there.\n"
    return head + yaml.dump(document, Dumper=_Plain, sort_keys=False)


class _Plain(yaml.SafeDumper):
    """A YAML dumper that writes a repeated list in full each time, without anchors."""

    def ignore_aliases(self, _: Any) -> bool:
        return True


def generated() -> dict[Path, str]:
    """Return path -> content that should be there."""
    crds = CHART / "templates" / "crds"
    pages = {CHART / "README.md": readme, CHART / "values.schema.json": schema}
    return {
        CHART / "files" / "rights.yaml": rules(),
        **{crds / name: text for name, text in crd_templates().items()},
        **{path: write(path.read_text(encoding="utf-8")) for path, write in pages.items()},
    }


if __name__ == "__main__":
    for target, text in generated().items():
        target.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {target.relative_to(Path.cwd())}\n")

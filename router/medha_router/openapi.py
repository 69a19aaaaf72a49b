"""The OpenAPI document of the HTTP API, and a page that shows it without assets of other sites.

Requests are described by the models that validate them. `/openapi.json` and `/docs` serve what is made here, once.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

from medha_router.openai_requests import KINDS
from medha_router.prepare import MOST_LOGPROBS, MOST_PROMPT_LOGPROBS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS: Schema = {"type": "array", "items": _ID}
_ANY_OBJECT: Schema = {"type": "object"}


def _object(**fields: Schema) -> Schema:
    """Return the schema of an object that has all these fields, and maybe others."""
    return {"type": "object", "required": list(fields), "properties": fields}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _constant(value: str) -> Schema:
    return {"type": "string", "enum": [value]}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_PROMPT: Schema = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        {"type": "array", "items": _ID, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
"""OpenAI's four types of prompt, which are checked by hand."""

_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    completion_tokens_details=_object(reasoning_tokens=_COUNT),
)
_FINISH: Schema = {"type": "string", "enum": ["stop", "length"]}
_LOGPROBS = _nullable(_ANY_OBJECT)
_MODEL = _object(
    id=_TEXT, object=_constant("model"), created=_COUNT, owned_by=_TEXT, root=_TEXT, max_model_len=_COUNT
)
_CALL = _object(id=_TEXT, type=_constant("function"), function=_object(name=_TEXT, arguments=_TEXT))
_MESSAGE: Schema = _object(role=_constant("assistant"), content=_nullable(_TEXT))
_MESSAGE["properties"]["tool_calls"] = _list(_CALL)  # only where functions are called
_MESSAGE["properties"] |= {"reasoning_content": _TEXT, "reasoning": _TEXT}  # only where there are thoughts
_CHAT_FINISH: Schema = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
_ANSWERS: Mapping[str, Schema] = {
    "/v1/chat/completions": _object(
        id=_TEXT,
        object=_constant("chat.completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list(
            _object(index=_COUNT, message=_MESSAGE, finish_reason=_CHAT_FINISH, logprobs=_LOGPROBS)
        ),
        usage=_USAGE,
    ),
    "/v1/completions": _object(
        id=_TEXT,
        object=_constant("text_completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list(_object(index=_COUNT, text=_TEXT, finish_reason=_FINISH, logprobs=_LOGPROBS)),
        usage=_USAGE,
    ),
    "/v1/responses": _object(
        id=_TEXT,
        object=_constant("response"),
        created_at=_COUNT,
        status={"type": "string", "enum": ["completed", "incomplete"]},
        model=_TEXT,
        output=_list(_object(id=_TEXT, type=_TEXT, status=_TEXT)),
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
        temperature=_NUMBER,
        top_p=_NUMBER,
    ),
    "/tokenize": _object(count=_COUNT, max_model_len=_COUNT, tokens=_IDS),
    "/detokenize": _object(prompt=_TEXT),
}
_PAGES: Mapping[str, tuple[str, Schema]] = {
    "/v1/models": (
        "The models that can be served now",
        _object(object=_constant("list"), data=_list(_MODEL)),
    ),
    "/v1/models/{model}": ("One model, by its name or an alias", _MODEL),
    "/version": ("Medha's version", _object(version=_TEXT)),
    "/health": ("200 while the router runs", _object(status=_constant("ok"))),
    "/ready": ("200 while a replica is ready", _ANY_OBJECT),
    "/accepting": ("200 once the router should get requests", _ANY_OBJECT),
}
_SUMMARIES: Mapping[str, str] = {
    "/v1/chat/completions": "Continue a conversation",
    "/v1/completions": "Continue one or several texts",
    "/v1/responses": "Answer a conversation, without state",
    "/tokenize": "Convert a text or a conversation to token ids",
    "/detokenize": "Convert token ids to text",
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ERRORS: Mapping[int, str] = {
    400: "The request cannot be served as it is",
    401: "No API key, or one that is not accepted",
    403: "Another site's page, another host name, or a service class that the key may not use",
    404: "An unknown model",
    408: "The request arrives too slowly",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Too much waits already, or a limit of the API key is reached",
    500: "The request failed on this server",
    503: "No replica is ready, or none has enough memory",
}


def document(version: str) -> Schema:
    """Return the OpenAPI document of the paths that clients use."""
    schemas: dict[str, Schema] = {}
    paths: dict[str, Schema] = {}
    for path, kind in KINDS.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        if path == "/v1/completions":
            schema["properties"]["prompt"] = _PROMPT
        if path == "/detokenize":
            schema["properties"]["tokens"] = _IDS
        schemas[kind.__name__] = schema
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        content: Schema = {"application/json": {"schema": _ANSWERS[path]}}
        if path in _STREAMED:
            content["text/event-stream"] = {"schema": _object(data=_TEXT)}  # of each event
        paths[path] = {
            "post": {
                "operationId": kind.__name__,
                "summary": _SUMMARIES[path],
                "requestBody": {"required": True, "content": body},
                "responses": {"200": {"description": "The answer", "content": content}, **_errors()},
            }
        }
    for path, (summary, schema) in _PAGES.items():
        found = {"description": summary, "content": {"application/json": {"schema": schema}}}
        operation: Schema = {"summary": summary, "responses": {"200": found, **_errors()}}
        if "{model}" in path:
            name = {
                "name": "model",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
            operation["parameters"] = [name]
        paths[path] = {"get": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Medha", "version": version, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _object(error=_object(message=_TEXT, type=_TEXT))},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


_DESCRIPTION = (
    "OpenAI's API for text, with latency targets. Fields that are not listed are refused if OpenAI, vLLM or SGLang know them "
    f"and they ask for something, else ignored. An answer has at most {MOST_PROMPT_LOGPROBS} log-probabilities of "
    f"prompts and, unless it is a stream, {MOST_LOGPROBS} of outputs."
)


def _errors() -> Schema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": text, "content": content} for status, text in _ERRORS.items()}


def page(described: Schema) -> str:
    """Return an HTML page of a document: its paths, with the fields of their requests."""
    sections = []
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            title = html.escape(f"{method.upper()} {path}")
            fields = _fields_table(described, operation)
            sections.append(f"<h2>{title}</h2><p>{html.escape(operation['summary'])}</p>{fields}")
    return _PAGE.format(
        title=html.escape(f"Medha {described['info']['version']}"),
        description=html.escape(described["info"]["description"]),
        sections="".join(sections),
    )


def _fields_table(described: Schema, operation: Schema) -> str:
    if "requestBody" not in operation:
        return ""
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = described["components"]["schemas"][reference.rpartition("/")[2]]
    rows = []
    for name, field in schema["properties"].items():
        type_ = {key: value for key, value in field.items() if key not in ("default", "title")}
        mark = " (required)" if name in schema.get("required", ()) else ""
        rows.append(
            f"<tr><th scope=row>{html.escape(name)}{mark}</th><td><code>{html.escape(json.dumps(type_))}</code></td></tr>"
        )
    return f"<table><tr><th scope=col>Field</th><th scope=col>JSON schema</th></tr>{''.join(rows)}</table>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font-family: system-ui, sans-serif; line-height: 1.5; }}
body {{ max-width: 60rem; margin: auto; padding: 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ border-bottom: 1px solid; padding: 0.25rem 0.5rem; text-align: left; vertical-align: top; }}
code {{ overflow-wrap: anywhere; }}
</style></head><body>
<h1>{title}</h1>
<p>{description} The whole description is <a href="/openapi.json">openapi.json</a>.</p>
{sections}
</body></html>
"""

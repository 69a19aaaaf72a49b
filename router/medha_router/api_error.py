"""OpenAI's error object and its status codes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from medha.errors import RequestInvalid
from medha.routing.router_events import Fail

_TYPES = {429: "rate_limit_error", 503: "service_unavailable"}


@dataclass(eq=False)
class ApiError(Exception):
    """The error that a client gets instead of tokens; `param` names the field, `code` is for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_seconds: int | None = None
    model: str | None = None
    """Model that the request named, whether or not it exists; None if it was not read."""
    service_tier: str | None = None
    limit: str | None = None
    """Limit of the client's API key that the request exceeds."""

    @property
    def is_ours(self) -> bool:
        """True if the server failed a request that might have been served; exceeding a key's limit is the client's fault."""
        return (self.status == 429 and self.limit is None) or self.status >= 500

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """Return OpenAI's error object, with the id of the request if it has one."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error if request_id is None else {**error, "request_id": request_id}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(self.retry_after_seconds)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.limit is not None:
            headers["x-medha-limit"] = self.limit
            if self.retry_after_seconds is None:
                headers["x-should-retry"] = "false"  # OpenAI's clients would try again by themselves
        return headers

    def fields(self) -> dict[str, Any]:
        """Return the fields for another process: `ApiError(**fields)` is this error again."""
        return asdict(self)

    @classmethod
    def from_invalid(cls, error: RequestInvalid) -> ApiError:
        status = 404 if error.code == "model_not_found" else 400
        return cls(status, str(error), error.param, error.code or "invalid_value")

    @classmethod
    def from_fail(cls, fail: Fail, prompt_field: str) -> ApiError:
        """Return the error of a failed sequence; `prompt_field` is the field of the request that has its prompt."""
        match fail.kind:
            case "invalid":
                return cls(400, fail.detail, code="invalid_value")
            case "too_long":
                return cls(400, fail.detail, prompt_field, "context_length_exceeded")
            case "model_not_found":
                return cls(404, fail.detail, "model", "model_not_found")
            case "overloaded":
                return cls(429, fail.detail, code="overloaded", retry_after_seconds=fail.retry_after_seconds)
            case "unavailable" | "out_of_memory" | "grammar_late":
                return cls(503, fail.detail, code=fail.kind, retry_after_seconds=fail.retry_after_seconds)
            case "internal":
                return cls(500, fail.detail, code="internal_error")

"""OpenAI's error object and its status codes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from medha.errors import RequestInvalid
from medha.routing.router_core import Fail

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

    @property
    def is_ours(self) -> bool:
        """True if the server failed the client: the request might have been served."""
        return self.status == 429 or self.status >= 500

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status) or _type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_seconds is None else {"Retry-After": str(self.retry_after_seconds)}

    def fields(self) -> dict[str, Any]:
        """Return the fields for another process: `ApiError(**fields)` is this error again."""
        return asdict(self)

    @classmethod
    def from_invalid(cls, error: RequestInvalid) -> ApiError:
        status = 404 if error.code == "model_not_found" else 400
        return cls(status, str(error), error.param, error.code or "invalid_value")

    @classmethod
    def from_fail(cls, fail: Fail) -> ApiError:
        match fail.kind:
            case "invalid":
                return cls(400, fail.detail, code="invalid_value")
            case "too_long":
                return cls(400, fail.detail, "messages", "context_length_exceeded")
            case "model_not_found":
                return cls(404, fail.detail, "model", "model_not_found")
            case "overloaded":
                return cls(429, fail.detail, code="overloaded", retry_after_seconds=fail.retry_after_seconds)
            case "unavailable":
                return cls(503, fail.detail, code="unavailable", retry_after_seconds=fail.retry_after_seconds)
            case "out_of_memory":
                return cls(503, fail.detail, code="out_of_memory")
            case "internal":
                return cls(500, fail.detail, code="internal_error")


def _type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"

"""Authentication of clients: the API key in `Authorization` identifies the client, and no other field does."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from medha.api.api_keys import ApiKey
from medha_router.access_log import Entry
from medha_router.api_error import ApiError
from medha_router.event_streams import error_response
from medha_router.key_accounts import KeyAccounts
from medha_router.probe_paths import PROBE_PATHS


@dataclass(frozen=True)
class Credentials:
    """The `Authorization` headers of a request."""

    headers: tuple[bytes, ...]

    @classmethod
    def of(cls, scope: Scope) -> Credentials:
        return cls(tuple(value for name, value in scope["headers"] if name == b"authorization"))

    def key(self) -> bytes | None:
        """Return the key of `Authorization: Bearer KEY`; None if there is no such header, or another one too."""
        if len(self.headers) != 1:
            return None
        scheme, _, key = self.headers[0].strip().partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" and key.strip() else None


class Authentication:
    """Refuses requests without a valid key, and notes the key's entry for handlers and the log."""

    def __init__(self, app: ASGIApp, accounts: KeyAccounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBE_PATHS:
            entry = Entry.of(scope)
            presented = Credentials.of(scope).key()
            key = None if presented is None else self._accounts.find(presented)
            if key is None:
                error = _refusal(is_missing=presented is None)
                self._accounts.count_unauthenticated("missing" if presented is None else "unknown")
                entry.outcome = error.code
                await error_response(error, Entry.of(scope).request_id)(scope, receive, send)
                return
            entry.key_name = key.name
            scope["state"]["api_key"] = key
        await self._app(scope, receive, send)


def key_of(scope: Scope) -> ApiKey | None:
    """Return the entry of the key that a request was sent with; None if this router asks for none."""
    key: ApiKey | None = scope["state"].get("api_key")
    return key


def _refusal(*, is_missing: bool) -> ApiError:
    """Return the error of a request without a valid key. Like the log, it never repeats what was sent as one."""
    text = (
        "this server needs an API key: send it as `Authorization: Bearer KEY`"
        if is_missing
        else "the API key is not valid on this server: check it, or ask for a new one"
    )
    return ApiError(401, text, code="invalid_api_key")

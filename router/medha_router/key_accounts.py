"""The API keys that a router accepts now, what each has used, and what a request may do by its key."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable

from medha.api.api_keys import ApiKey, ApiKeys, owner_of_key
from medha.routing.fleet_use import REPORT_SECONDS, FleetUse
from medha.routing.key_limits import (
    Arrived,
    Ended,
    Event,
    OverLimit,
    Sampled,
    Tokenised,
    Usage,
    UsedElsewhere,
    decide,
    emptied,
)
from medha.routing.router_events import ServedElsewhere
from medha.wire.messages import KeyUse, RouterUse
from medha_router.api_error import ApiError
from medha_router.router_metrics import Observer

_ACTIONS = {
    "requestsPerMinute": "may send {value} requests a minute",
    "tokensPerMinute": "may use {value} tokens a minute, prompts and outputs together",
    "concurrency": "may have {value} requests open at the same time",
}


class KeyAccounts:
    """The accounts of all keys. Without keys, everybody may send requests, and nothing is limited."""

    def __init__(self, keys: ApiKeys | None, observer: Observer, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._keys = keys
        self._observer = observer
        self._clock = clock
        self._usages: dict[str, Usage] = {}
        self._fleet = FleetUse()
        self._router = secrets.token_hex(8)
        self._reported = RouterUse(self._router, 0)
        self._reported_at = -math.inf
        self._begun: dict[str, int] = {}  # by key: number of the first report that can have its present usage

    @property
    def required(self) -> bool:
        """True if requests need a key."""
        return self._keys is not None

    def replace(self, keys: ApiKeys) -> None:
        """Accept these keys from now on. Requests that are open continue; a name that stays keeps its usage."""
        self._keys = keys
        self._forget_idle()

    def find(self, presented: bytes) -> ApiKey | None:
        return None if self._keys is None else self._keys.find(presented)

    def count_unauthenticated(self, reason: str) -> None:
        self._observer.unauthenticated(reason)

    def open_requests(self) -> dict[str, int]:
        """Return the number of open requests by name, of each key that is accepted or has some."""
        self._forget_idle()
        names = self._names() | self._usages.keys()
        return {
            name: usage.open_requests if (usage := self._usages.get(name)) is not None else 0
            for name in names
        }

    def account(self, key: ApiKey | None) -> Account:
        """Return the account of a request with this key."""
        return Account(key, self, self._observer)

    def apply(self, key: ApiKey, event: Event) -> OverLimit | None:
        """Record an event of a request with this key; return a refusal if its limits do not allow it.

        The limits are those that are in force now, also for a request that began under others.
        """
        now = self._clock()
        key = (self._keys.named(key.name) if self._keys is not None else None) or key
        usage = self._usages.get(key.name, Usage(now))
        self._begun.setdefault(key.name, self._reported.number + 1)
        elsewhere = self._fleet.open_requests(key.name, now)
        self._usages[key.name], refusal = decide(usage, event, key, now, elsewhere)
        return refusal

    # Other routers --------------------------------------------------------------------------------

    def due_report(self) -> RouterUse | None:
        """Return the report for the other routers, if one is due or something has changed since the last."""
        if self._keys is None:
            return None
        now = self._clock()
        reported = _totals(self._reported.keys)
        uses = []
        for name, usage in list(self._usages.items()):
            key = self._keys.named(name)
            if key is not None:
                self._usages[name] = usage = emptied(usage, key, now)
            use = KeyUse(
                name,
                self._begun[name],
                usage.total_requests,
                usage.total_tokens,
                usage.open_requests,
                usage.requests,
                usage.tokens,
            )
            if usage.is_idle and _totals([use]) <= reported:  # else the others have yet to hear of it
                del self._usages[name], self._begun[name]
            else:
                uses.append(use)
        if _totals(uses) == reported and now - self._reported_at < REPORT_SECONDS:
            return None
        self._reported_at = now
        self._reported = RouterUse(self._router, self._reported.number + 1, tuple(uses))
        return self._reported

    def heard(self, report: RouterUse) -> list[ServedElsewhere]:
        """Take another router's report of its clients' use; return what owners were served there since its last one."""
        if self._keys is None or report.router == self._router:
            return []
        served: list[ServedElsewhere] = []
        for name, event in self._fleet.heard(report, self._clock()):
            key = self._keys.named(name)
            if key is None:
                continue
            self.apply(key, event)
            if isinstance(event, UsedElsewhere) and event.tokens:
                served.append(ServedElsewhere(owner_of_key(name), event.tokens))
        return served

    def lost(self, router: str) -> None:
        """Count no open requests of another router until it reports again."""
        self._fleet.lost(router)

    def _names(self) -> frozenset[str]:
        return frozenset() if self._keys is None else self._keys.names

    def _forget_idle(self) -> None:
        """Forget keys that are no longer accepted, once their last request has ended."""
        for name in self._usages.keys() - self._names():
            if self._usages[name].open_requests == 0:
                del self._usages[name], self._begun[name]


def _totals(uses: Iterable[KeyUse]) -> set[tuple[str, int, int, int, int]]:
    """Return the counts that change only by use at this router; how levels change with time is known everywhere."""
    return {
        (use.key, use.begun, use.requests, use.tokens, use.open_requests)
        for use in uses
        if use.requests or use.tokens or use.open_requests
    }


class Account:
    """A request's view of its key: it charges the request's use, and checks what the key allows."""

    def __init__(self, key: ApiKey | None, accounts: KeyAccounts, observer: Observer) -> None:
        self._key = key
        self._accounts = accounts
        self._observer = observer

    def begin(self) -> None:
        """Count a request that has arrived; `end` must follow.

        Raises:
            ApiError: 429, a limit of the key is reached. Then the request has not begun, and `end` must not follow.
        """
        self._charge(Arrived())
        if self._key is not None:
            self._observer.key_request(self._key.name)

    def charge_prompts(self, tokens: int, model: str) -> None:
        """Charge the tokens of all prompts of the request, as often as they are computed.

        Raises:
            ApiError: 429, they exceed what the key may use now, or ever.
        """
        self._charge(Tokenised(tokens), model, tokens)
        if self._key is not None:
            self._observer.key_tokens(self._key.name, prompt_tokens=tokens)

    def charge_output(self, tokens: int) -> None:
        self._charge(Sampled(tokens))
        if self._key is not None:
            self._observer.key_tokens(self._key.name, output_tokens=tokens)

    def end(self) -> None:
        self._charge(Ended())

    def cache_salt(self, wanted: str) -> str:
        """Return the salt under which the request shares KV; `wanted` is the client's own.

        Two keys never have a salt in common, whatever clients ask for: the first line is the key's.
        """
        return wanted if self._key is None else f"{self._key.cache_domain}\n{wanted}"

    def owner(self, otherwise: str) -> str:
        """Return the owner to which the request counts (`Submit.owner`): its key, or `otherwise` if the router has no keys.

        Callers pass the request's id, because a connection has one request at a time, or the client's address.
        """
        return otherwise if self._key is None else owner_of_key(self._key.name)

    @property
    def key_name(self) -> str:
        """Name of the key; empty without keys."""
        return "" if self._key is None else self._key.name

    def ttft_attained(self, met: bool) -> None:
        """Count a request by whether its first token met its target."""
        if self._key is not None:
            self._observer.key_ttft_attained(self._key.name, met)

    def service_class(self, wanted: str, classes: Iterable[str], model: str) -> str | None:
        """Return the class of a request that names `wanted` (`auto` and `default` leave the choice to the server).

        None if the model has no class of that name.

        Raises:
            ApiError: 403, the key may not use the class, or none of the model's.
        """
        known = tuple(classes)
        allowed = [name for name in known if self._may_use(name)]
        if wanted in known:
            if wanted in allowed:
                return wanted
        elif wanted not in ("auto", "default"):
            return None
        elif allowed:
            return allowed[0]
        assert self._key is not None
        assert self._key.service_classes is not None
        self._observer.key_refused(self._key.name, "serviceClasses")
        if allowed:
            text = f"may not use the service class {wanted!r}; name one of {', '.join(allowed)} in `service_tier`"
        else:
            own = ", ".join(self._key.service_classes)
            text = f"may use the service classes {own} only, and this model has none of them: it has {', '.join(known)}"
        text = f"the API key {self._key.name!r} {text}"
        raise ApiError(
            403, text, "service_tier", "service_class_not_allowed", model=model, limit="serviceClasses"
        )

    def require_own_targets(self) -> None:
        """Check that the client may set latency targets of its own.

        Raises:
            ApiError: 403, the key is limited to some service classes, and so to their targets.
        """
        if self._key is None or self._key.service_classes is None:
            return
        self._observer.key_refused(self._key.name, "serviceClasses")
        text = (
            f"the API key {self._key.name!r} has the latency targets of its service classes (serviceClasses) and no other; "
            "leave out the headers with targets, such as x-slo-ttft-ms"
        )
        raise ApiError(403, text, code="target_not_allowed", limit="serviceClasses")

    def _may_use(self, service_class: str) -> bool:
        return (
            self._key is None
            or self._key.service_classes is None
            or service_class in self._key.service_classes
        )

    def _charge(self, event: Event, model: str | None = None, tokens: int = 0) -> None:
        if self._key is None:
            return
        refusal = self._accounts.apply(self._key, event)
        if refusal is None:
            return
        self._observer.key_refused(self._key.name, refusal.limit)
        text = f"the API key {self._key.name!r} {_ACTIONS[refusal.limit].format(value=refusal.value)} ({refusal.limit})"
        if refusal.wait_seconds is None:
            text += f"; the prompts of this request count as {tokens} tokens, so shorten them"
            wait_seconds = None
        else:
            wait_seconds = max(1, math.ceil(refusal.wait_seconds))
            text += f"; try again in {wait_seconds} s"
        raise ApiError(
            429,
            text,
            code="rate_limit_exceeded",
            retry_after_seconds=wait_seconds,
            model=model,
            limit=refusal.limit,
        )

"""The API keys of a router's clients, as data: who may send requests, and how many.

A router reads them from a file, YAML or JSON; `medha keys` writes it. The file holds hashes of the keys, and
no key. No error of this module quotes a text of the file, because somebody may have written a key there.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from medha.errors import ConfigInvalid

MOST_KEYS = 1000
"""Largest number of entries of a file: every request is compared with all of them, and each has its own metrics."""
MOST_HASHES = 8
"""Largest number of hashes of an entry."""

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_Name = Annotated[str, Field(pattern=_NAME)]
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Limit = Annotated[int, Field(ge=1, le=10**12)]
_EXPECTED = {
    "string_pattern_mismatch": "has a character or a length that is not allowed",
    "extra_forbidden": "is unknown",
    "missing": "is missing",
}
_MEANINGS = {
    "name": "up to 63 letters, digits and `._-`, the first a letter or a digit",
    "sha256": "the SHA-256 of the key in 64 digits 0-9a-f, in quotes, or a list of these",
    "serviceClasses": "a list of names of service classes, or leave it out to allow all",
    "cacheGroup": "up to 63 letters, digits and `._-`, the first a letter or a digit",
}
_NUMBER = "a whole number from 1 on, or leave it out for no limit"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _Entry(BaseModel):
    """Common settings: camelCase outside, frozen; unknown fields are refused, as a misspelt limit would not limit."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )


class ApiKey(_Entry):
    """A client of a router: its name, the hashes of its keys, and its limits."""

    name: _Name
    """The name in logs and metrics. It identifies the client, also when its key is replaced."""
    sha256: Annotated[
        tuple[_Hash, ...], BeforeValidator(_as_list), Field(min_length=1, max_length=MOST_HASHES)
    ]
    """SHA-256 of the client's key, in hexadecimal; several while one key replaces another."""
    requests_per_minute: _Limit | None = None
    """Largest number of requests a minute; the requests of a minute may come at once."""
    tokens_per_minute: _Limit | None = None
    """Largest number of tokens a minute, prompts and outputs together."""
    concurrency: _Limit | None = None
    """Largest number of requests at the same time."""
    service_classes: Annotated[tuple[_Name, ...], Field(min_length=1, max_length=32)] | None = None
    """Service classes that requests may use; the first of the model's that is listed is the default. None: all."""
    cache_group: _Name | None = None
    """Keys of one group share the KV of prompts that begin alike. None: the key shares with no other."""

    @property
    def cache_domain(self) -> str:
        """The text that keeps this key's cached KV apart from that of others; it differs from that of any other key."""
        return f"key:{self.name}" if self.cache_group is None else f"group:{self.cache_group}"


class _Document(_Entry):
    keys: tuple[ApiKey, ...] = Field(max_length=MOST_KEYS)

    @model_validator(mode="after")
    def _no_name_or_hash_twice(self) -> _Document:
        names: set[str] = set()
        hashes: set[str] = set()
        for place, key in enumerate(self.keys):
            if key.name in names:
                raise ValueError(
                    f"keys.{place}.name is the name of an earlier entry; list all hashes of a client in one"
                )
            names.add(key.name)
            if len({*key.sha256}) < len(key.sha256) or hashes & {*key.sha256}:
                raise ValueError(
                    f"keys.{place}.sha256 has a hash that is already listed; make a key for each entry"
                )
            hashes |= {*key.sha256}
        return self


def hash_of(key: str) -> str:
    """Return the SHA-256 of a key, in hexadecimal."""
    return sha256(key.encode()).hexdigest()


def owner_of_key(name: str) -> str:
    """Return whose the requests of an API key are, as in `medha.wire.messages.Submit.owner`."""
    return f"key:{name}"


class ApiKeys:
    """The keys of one file."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self.keys = tuple(keys)
        self._by_name = {key.name: key for key in self.keys}
        self._hashes = [(bytes.fromhex(one), key) for key in self.keys for one in key.sha256]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def named(self, name: str) -> ApiKey | None:
        return self._by_name.get(name)

    def find(self, presented: bytes) -> ApiKey | None:
        """Return the entry of a client's key; None if there is none.

        All entries are compared, each in constant time, so that the time reveals nothing about any hash.
        """
        given = sha256(presented).digest()
        found = None
        for known, key in self._hashes:
            if compare_digest(known, given):
                found = key
        return found

    def with_entry(self, entry: dict[str, Any]) -> ApiKeys:
        """Return these keys with an entry, in the form of the file, that is new or replaces the one of its name.

        Raises:
            ConfigInvalid: the entry is invalid.
        """
        others = [key.model_dump(by_alias=True) for key in self.keys]
        places = [place for place, key in enumerate(self.keys) if key.name == entry["name"]]
        place = places[0] if places else len(others)
        others[place : place + 1] = [entry]
        return _checked({"keys": others}, "the new entry")

    def text(self) -> str:
        """Return the content of a file with these keys, as YAML."""
        entries = [key.model_dump(mode="json", by_alias=True, exclude_none=True) for key in self.keys]
        for entry in entries:
            if len(entry["sha256"]) == 1:
                (entry["sha256"],) = entry["sha256"]
        return yaml.safe_dump({"keys": entries}, sort_keys=False)

    @classmethod
    def from_text(cls, text: str | bytes, where: str) -> ApiKeys:
        """Return the keys of a file's content; `where` names the file in errors.

        Raises:
            ConfigInvalid: the content is invalid; names the place and what was expected.
        """
        try:
            document = yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
            raise ConfigInvalid(f"{where}: is neither YAML nor JSON{place}; see docs/api-keys.md") from None
        except Exception:  # noqa: BLE001 - YAML raises anything for tags and dates that do not fit
            raise ConfigInvalid(f"{where}: is neither YAML nor JSON; see docs/api-keys.md") from None
        return _checked(document, where)


def _checked(document: Any, where: str) -> ApiKeys:
    try:
        return ApiKeys(_Document.model_validate(document).keys)
    except ValidationError as error:
        raise ConfigInvalid(f"{where}: {_problem(error)}") from None  # the error itself quotes the file


def _problem(error: ValidationError) -> str:
    """Return the first problem of a document, in words that quote none of its texts."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    places = first["loc"]
    if first["type"] == "extra_forbidden":
        parent = ".".join(str(place) for place in places[:-1]) or "the file"
        known = ", ".join(to_camel(name) for name in (ApiKey if len(places) > 1 else _Document).model_fields)
        return f"{parent} has an unknown field; the fields are {known}"
    place = ".".join(str(place) for place in places) or "the file"
    if len(places) < 3:
        return f"{place} is not as expected: write `keys:` with a list of at most {MOST_KEYS} entries {{name, sha256, ...}}"
    field = str(places[2])
    given = f"is {first['input']!r}" if isinstance(first["input"], int | float) else _EXPECTED.get(
        first["type"], "is not as expected"
    )  # fmt: skip
    return f"{place} {given}; give {_MEANINGS.get(field, _NUMBER)}"

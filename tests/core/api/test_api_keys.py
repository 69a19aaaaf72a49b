"""API keys as data: read, compared, written, and never quoted."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from medha.api.api_keys import MOST_HASHES, MOST_KEYS, ApiKey, ApiKeys, hash_of
from medha.errors import ConfigInvalid

SECRET = "sk-medha-nobody-may-read-this"
A, B = hash_of("a"), hash_of("b")


def keys(*entries: dict[str, Any]) -> ApiKeys:
    return ApiKeys(ApiKey.model_validate(entry) for entry in entries)


def test_a_hash_is_that_of_the_tools_of_every_system() -> None:
    assert hash_of("é") == sha256("é".encode()).hexdigest()


def test_a_key_is_found_by_each_of_its_hashes_and_by_nothing_else() -> None:
    found = keys({"name": "one", "sha256": [A, B]}, {"name": "two", "sha256": hash_of("c")})
    assert [key and key.name for key in map(found.find, (b"a", b"b", b"c"))] == ["one", "one", "two"]
    for wrong in (b"", b"d", b"a ", A.encode(), bytes.fromhex(A), b"\xff"):
        assert found.find(wrong) is None


def test_what_is_written_is_read_again() -> None:
    whole = keys(
        {
            "name": "All.of-it_1",
            "sha256": [A, "0" * 64],
            "requestsPerMinute": 1,
            "tokensPerMinute": 2,
            "concurrency": 3,
            "serviceClasses": ["batch"],
            "cacheGroup": "team",
        },
        {"name": "plain", "sha256": B},
    )
    assert ApiKeys.from_text(whole.text(), "f").keys == whole.keys
    assert ApiKeys.from_text('{"keys": []}', "f").keys == ()


def test_an_entry_replaces_the_one_of_its_name_and_keeps_the_others() -> None:
    first = keys(
        {"name": "one", "sha256": A, "concurrency": 3, "cacheGroup": "g"}, {"name": "two", "sha256": B}
    )
    changed = first.with_entry({"name": "one", "sha256": [A, hash_of("c")]})
    assert [(key.name, len(key.sha256), key.concurrency) for key in changed.keys] == [
        ("one", 2, None),
        ("two", 1, None),
    ]
    assert changed.with_entry({"name": "three", "sha256": hash_of("d")}).names == {"one", "two", "three"}


def test_keys_of_one_group_share_a_cache_and_all_others_have_their_own() -> None:
    made = keys(
        {"name": "a", "sha256": A, "cacheGroup": "b"}, {"name": "b", "sha256": B},
        {"name": "c", "sha256": hash_of("c"), "cacheGroup": "b"},
    )  # fmt: skip
    domains = [key.cache_domain for key in made.keys]
    assert domains[0] == domains[2] != domains[1]


ENTRY = f"{{name: one, sha256: '{A}'"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "the file is not as expected"),
        ("keys: 5", "keys is not as expected"),
        (f"keys: [{SECRET}]", "keys.0 is not as expected"),
        (f"keys: [{{name: '{SECRET}~', sha256: '{A}'}}]", "keys.0.name has a character or a length"),
        (f"keys: [{{name: one, sha256: {SECRET}}}]", "keys.0.sha256.0 has a character or a length"),
        ("keys: [{name: one, sha256: 7}]", "keys.0.sha256 is 7; give the SHA-256"),
        ("keys: [{name: one, sha256: []}]", "keys.0.sha256 is not as expected"),
        ("keys: [{name: one}]", "keys.0.sha256 is missing"),
        (f"keys: [{ENTRY}, key: {SECRET}}}]", "keys.0 has an unknown field; the fields are name, sha256, requestsPerMinute"),
        (f"keys: [{ENTRY}, {SECRET}: 1}}]", "keys.0 has an unknown field"),
        (f"keys: []\n{SECRET}: 1", "the file has an unknown field; the fields are keys"),
        (f"keys: [{ENTRY}, concurrency: 0}}]", "keys.0.concurrency is 0; give a whole number from 1 on"),
        (f"keys: [{ENTRY}, tokensPerMinute: 1.5}}]", "keys.0.tokensPerMinute is 1.5"),
        (f"keys: [{ENTRY}, requestsPerMinute: {SECRET}}}]", "keys.0.requestsPerMinute is not as expected"),
        (f"keys: [{ENTRY}, serviceClasses: []}}]", "keys.0.serviceClasses is not as expected"),
        (f"keys: [{ENTRY}}}, {{name: one, sha256: '{B}'}}]", "keys.1.name is the name of an earlier entry"),
        (f"keys: [{ENTRY}}}, {{name: two, sha256: '{A}'}}]", "keys.1.sha256 has a hash that is already listed"),
        (f"keys: [{{name: one, sha256: ['{A}', '{A}']}}]", "keys.0.sha256 has a hash that is already listed"),
        (f"keys: [{{name: one, sha256: {[hash_of(str(i)) for i in range(MOST_HASHES + 1)]}}}]", "keys.0.sha256"),
        (f"keys:\n- name: {SECRET}\n  sha256: [", "is neither YAML nor JSON at line 3"),
        ("keys: 2026-99-99", "is neither YAML nor JSON"),
        ("\x00", "is neither YAML nor JSON"),
        ("[" * 5000, "is neither YAML nor JSON"),
        (f"keys: !!bool {SECRET}", "is neither YAML nor JSON"),
        (f"keys: !!timestamp {SECRET}", "is neither YAML nor JSON"),
        (f"keys: !!python/name:{SECRET} x", "is neither YAML nor JSON at line 1"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_its_place_and_never_quoted(text: str, named: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        ApiKeys.from_text(text, "keys.yaml")
    assert f"keys.yaml: {named}" in str(refused.value)
    shown: BaseException | None = refused.value
    while shown is not None:  # a traceback shows these too, unless their context is suppressed
        assert SECRET not in str(shown)
        shown = shown.__cause__ if shown.__suppress_context__ else shown.__context__


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match="neither YAML nor JSON"):
        ApiKeys.from_text(b"\xff\xfe\xff", "f")


def test_a_file_has_a_bounded_number_of_keys() -> None:
    many = [{"name": f"k{i}", "sha256": hash_of(str(i))} for i in range(MOST_KEYS + 1)]
    assert len(ApiKeys.from_text(keys(*many[1:]).text(), "f").keys) == MOST_KEYS
    with pytest.raises(ConfigInvalid, match=f"at most {MOST_KEYS} entries"):
        ApiKeys.from_text(keys(*many).text(), "f")

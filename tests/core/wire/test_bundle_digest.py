"""The name of a bundle."""

from __future__ import annotations

from medha.wire.bundle_digest import bundle_digest


def test_the_digest_does_not_depend_on_the_order_of_the_files() -> None:
    files = {"tokenizer.json": b"{}", "chat_template.jinja": b"x"}
    assert bundle_digest(files) == bundle_digest(dict(reversed(files.items())))
    assert len(bundle_digest(files)) == 64


def test_every_change_of_a_name_or_a_content_changes_the_digest() -> None:
    bundles = [
        {},
        {"a": b""},
        {"a": b"b"},
        {"ab": b""},
        {"a": b"", "b": b""},
        {"a": b"1", "b": b"2"},
        {"a": b"2", "b": b"1"},
        {"a": b"12", "b": b""},
        {"ä": b""},
    ]
    assert len({bundle_digest(files) for files in bundles}) == len(bundles)

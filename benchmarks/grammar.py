"""Structured output: what a grammar costs to compile and per token, beside another library, and what it guarantees.

llguidance, which Medha uses, is measured beside xgrammar, if that is installed (`--peer FOLDER` names a folder that has it,
with what it needs beside torch). Both follow the same texts with the same vocabularies, whose tokens are made, not learned.

Then a checkpoint of the preset `small` is served, and 8 streams follow a schema that is longer than they are; their time per
output token is compared with that of 8 streams beside which nothing differs but the schema. Both are measured in turn.

`--suite FOLDER` checks each schema of a JSON Schema test suite (a folder of its JSON files): it is followed, and then accepts
no instance that the suite calls invalid, or it is refused. PyPI's source archive of `jsonschema` carries one, in `json/tests`.

    python benchmarks/grammar.py
    python benchmarks/grammar.py --quick
    python benchmarks/grammar.py --suite jsonschema-4.26.0/json/tests/draft2020-12
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from harness import LOOPS, Loop, Row, claim, exit_with, parser, progress, ratio, report, table
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from served import medha_up, served, write_manifest

from medha.errors import RequestInvalid
from medha.wire.grammar_limits import PARSER_LIMITS
from medha_router.grammar_check import GrammarCheck
from medha_router.structured_output import json_grammar, require
from medha_worker.checkpoints.presets import init_checkpoint

VOCABULARIES = {"tiny": 512, "small": 4096, "large": 131_072}  # tokens
STREAMS = (1, 8, 32)
SERVED_STREAMS = 8
SERVED_PRESET = "small"
MOST_TPOT_RATIO = 1.05
ROWS: Row = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "colour": {"enum": ["red", "green", "blue"]},
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,9}$"}, "maxItems": 3},
        },
        "required": ["id", "colour", "name", "tags"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
"""A schema that no stream is long enough to complete."""
DIALECTS = {f"draft{number}": f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7)}
"""Dialects of a suite's folders whose schemas do not name theirs."""
WORDS_OF_JSON = (
    '{"', '"}', '": "', '":', ': ', '", "', '"],', "}]", '[{', "},", "[[", ",", '":"', '","', '":{', '":[', "\n  ", "true", "false", "null",
)  # fmt: skip
SYLLABLES = [a + b + c for a in "bcdfghjklmnprstvwz" for b in "aeiou" for c in ("", "n", "r", "s", "t", "l")]


class Vocabulary:
    """Made tokens: all bytes, parts of JSON, numbers and words. Called with a text, it takes the longest tokens first."""

    def __init__(self, size: int, seed: int) -> None:
        chance = random.Random(seed)
        found = dict.fromkeys(bytes([byte]) for byte in range(256))
        found |= dict.fromkeys(word.encode() for word in WORDS_OF_JSON)
        found |= dict.fromkeys(str(number).encode() for number in range(min(1000, size // 8)))
        while len(found) < size - 1:
            word = "".join(chance.choice(SYLLABLES) for _ in range(chance.choice((1, 1, 2, 2, 2, 3, 3, 4))))
            found[chance.choice(("", " ", " ", "_")).encode() + word.encode()] = None
        self.tokens = [b"<end>", *found][:size]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = 0, None, [0]
        self._ids = {token: number for number, token in enumerate(self.tokens) if number}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        rest = text.encode() if isinstance(text, str) else text
        ids = []
        while rest:
            length = next(n for n in range(min(self._longest, len(rest)), 0, -1) if rest[:n] in self._ids)
            ids.append(self._ids[rest[:length]])
            rest = rest[length:]
        return ids


def small_schema() -> Row:
    tags = {"type": "array", "items": {"type": "string"}}
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": tags}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def large_schema(fields: int = 400) -> Row:
    """Return a schema of some 35 KB: texts, numbers, choices and references."""
    kinds: list[Callable[[int], Row]] = [
        lambda _: {"type": "string"},
        lambda _: {"type": "number"},
        lambda _: {"enum": [f"v{choice}" for choice in range(20)]},
        lambda number: {"$ref": f"#/$defs/d{number % 20}"},
    ]
    properties = {f"field_{number}": kinds[number % 4](number) for number in range(fields)}
    shape = {"type": "object", "additionalProperties": False, "required": list(properties)}
    return {
        **shape,
        "properties": properties,
        "$defs": {f"d{number}": small_schema() for number in range(20)},
    }


SCHEMAS = {"small": small_schema(), "large": large_schema()}


def instance(schema: Row, root: Row) -> Any:
    """Return a value of one of the schemas above."""
    if "$ref" in schema:
        return instance(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "enum" in schema:
        return schema["enum"][-1]
    match schema["type"]:
        case "object":
            return {name: instance(one, root) for name, one in schema["properties"].items()}
        case "array":
            return [instance(schema["items"], root)] * 3
        case "string":
            return "Doran velbor tasin, gor."
        case kind:
            return 41 if kind == "integer" else 3.25


class Ours:
    """llguidance with Medha's limits and options."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[0])
        self._words = np.zeros(-(-len(vocabulary.tokens) // 32), dtype=np.int32)

    def compiled(self, schema: Row) -> LLMatcher:
        grammar = json_grammar("schema", schema)
        return LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS._asdict())
        )

    def copy(self, compiled: LLMatcher) -> LLMatcher:
        return compiled.deep_copy()

    def mask(self, matcher: LLMatcher) -> None:
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)

    def accept(self, matcher: LLMatcher, token: int) -> None:
        assert matcher.consume_token(token), matcher.get_error()


class Peer:
    """xgrammar, which is imported from where `--peer` says."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._library = xgrammar
        size = len(vocabulary.tokens)
        kind = xgrammar.VocabType.RAW
        info = xgrammar.TokenizerInfo(vocabulary.tokens, vocab_type=kind, vocab_size=size, stop_token_ids=[0])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._words = xgrammar.allocate_token_bitmask(1, size)

    def compiled(self, schema: Row) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema))

    def copy(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def mask(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._words)

    def accept(self, matcher: Any, token: int) -> None:
        assert matcher.accept_token(token)


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of this thread that a call takes, and its result."""
    started = time.thread_time()
    found = call()
    return time.thread_time() - started, found


def measure(library: Any, vocabulary: Vocabulary, schema: Row, tokens: int) -> Row:
    """Compile a schema three times, then follow a text of it."""
    compiling, compiled = zip(*(seconds_of(lambda: library.compiled(schema)) for _ in range(3)), strict=True)
    ids = vocabulary(json.dumps(instance(schema, schema)))[:tokens]
    matcher = library.copy(compiled[0])
    masks = []
    for token in ids:
        masks.append(seconds_of(lambda: library.mask(matcher))[0])
        library.accept(matcher, token)
    spent = {}
    for streams in STREAMS:
        matchers = [library.copy(compiled[0]) for _ in range(streams)]
        started = time.thread_time()
        for token in ids[:60]:
            for one in matchers:
                library.mask(one)
                library.accept(one, token)
        spent[str(streams)] = (time.thread_time() - started) / len(ids[:60])
    median, last = np.quantile(masks, (0.5, 0.99)).tolist()
    return {
        "compile_seconds": min(compiling),
        "mask_median_seconds": median,
        "mask_p99_seconds": last,
        "mask_longest_seconds": max(masks),
        "step_seconds_by_streams": spent,
    }


def are_equal_on_threads(vocabulary: Vocabulary, schema: Row) -> bool:
    """Return whether copies of one matcher that follow a text on four threads at once have the masks of one alone."""
    ours = Ours(vocabulary)
    first, ids = ours.compiled(schema), vocabulary(json.dumps(instance(schema, schema)))[:150]

    def followed(matcher: LLMatcher) -> list[bytes]:
        masks = []
        for token in ids:
            masks.append(matcher.compute_bitmask())
            matcher.consume_token(token)
        return masks

    alone = followed(first.deep_copy())
    with ThreadPoolExecutor(4) as pool:
        return all(masks == alone for masks in pool.map(followed, [first.deep_copy() for _ in range(8)]))


async def tpot_seconds(url: str, tokens: int, *, is_guided: bool, round_number: int) -> float:
    """Return the mean time per output token of streams that run together."""
    limits = httpx.Limits(max_connections=SERVED_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def stream(number: int) -> float:
            body: Row = {
                "model": "m", "prompt": f"stream {number} of round {round_number}", "seed": number,
                "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            if is_guided:
                body["response_format"] = {
                    "type": "json_schema",
                    "json_schema": {"name": "rows", "schema": ROWS},
                }
            else:
                body["ignore_eos"] = True
            times, sampled = [], 0
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if event["choices"]:
                        times.append(time.monotonic())
                    else:
                        sampled = event["usage"]["completion_tokens"]
            assert sampled == tokens, f"a stream had {sampled} of {tokens} tokens"
            return (times[-1] - times[0]) / (tokens - 1)

        return statistics.mean(await asyncio.gather(*map(stream, range(SERVED_STREAMS))))


def measure_tpot(rounds: int, tokens: int, preset: str) -> Row:
    """Serve a checkpoint, and measure streams with and without a schema in turn; return seconds by round."""
    found: Row = {"preset": preset, "guided": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / preset
        init_checkpoint(checkpoint, preset=preset, seed=0)
        spec = {
            "model": {"name": "m", "source": {"path": str(checkpoint)}, "maxModelLen": 4096},
            "kvCache": {"size": "256Mi"},
            "threads": max(1, len(os.sched_getaffinity(0)) // 2),
        }
        manifest = Path(folder) / "guided.yaml"
        url = write_manifest(manifest, "guided", spec)
        with served(medha_up(manifest), url):
            for number in range(rounds + 1):  # the first one warms up
                order = (True, False) if number % 2 else (False, True)
                for is_guided in order:
                    taken = asyncio.run(tpot_seconds(url, tokens, is_guided=is_guided, round_number=number))
                    if number:
                        found["guided" if is_guided else "plain"].append(taken)
                if number:
                    both = [found[name][-1] * 1e3 for name in ("plain", "guided")]
                    progress(f"  round {number} of {rounds}: {both[0]:.2f} and {both[1]:.2f} ms a token")
    return found


def suite_cases(folder: Path) -> Iterator[tuple[Any, list[Row]]]:
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            schema = group["schema"]
            if isinstance(schema, dict) and folder.name in DIALECTS:
                schema = {"$schema": DIALECTS[folder.name], **schema}
            yield schema, group["tests"]


def accepting() -> Callable[[str, str], bool]:
    """Return a function that says whether a text is a whole one of a grammar."""
    vocabulary = Vocabulary(300, 0)  # byte b is token b + 1
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[0])

    def accepts(grammar: str, text: str) -> bool:
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        tokens = [byte + 1 for byte in text.encode()]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accepts


def check_suite(folder: Path) -> Row:
    """Return how many schemas are followed and refused, and what those that are followed say to the suite's instances."""
    accepts = accepting()
    check, counts = (
        GrammarCheck(),
        dict.fromkeys(("followed", "refused", "valid", "accepted", "invalid", "wrongly accepted"), 0),
    )
    wrong = []
    for schema, tests in suite_cases(folder):
        try:
            grammar = json_grammar("schema", schema)
            require(grammar, "schema", check)
        except RequestInvalid:
            counts["refused"] += 1
            continue
        counts["followed"] += 1
        for test in tests:
            accepted = accepts(grammar, json.dumps(test["data"], ensure_ascii=False))
            counts["valid" if test["valid"] else "invalid"] += 1
            counts["accepted"] += test["valid"] and accepted
            if accepted and not test["valid"]:
                counts["wrongly accepted"] += 1
                wrong.append({"schema": schema, "data": test["data"]})
    return {**counts, "wrong": wrong}


def claims(rows: Sequence[Row], loop: Loop, facts: Row) -> list[Row]:
    """Return the claims of a run; ratios to the other library where it was measured."""

    def of(library: str, part: str) -> float:
        (row,) = [
            row
            for row in rows
            if (row["library"], row["vocabulary"], row["schema"]) == (library, VOCABULARIES["large"], "large")
        ]
        found = row[part]
        return float(found["8"] if isinstance(found, dict) else found)

    size = f"large schema, {VOCABULARIES['large']} tokens"
    eight, parts = f"masks of 8 streams, {size}", ("compile_seconds", "step_seconds_by_streams")
    found = [
        claim(f"compiling the {size}", loop.ratio(of(Ours.name, parts[0])), LOOPS, 60, peer=loop.peer()),
        claim(eight, loop.ratio(of(Ours.name, parts[1])), LOOPS, 0.5, peer=loop.peer()),
        claim("threads that changed a mask", facts["threads_that_differ"], "runs", 0),
    ]
    served_streams = facts["served"]
    times = ratio(served_streams["guided"], served_streams["plain"])
    name = f"TPOT of {SERVED_STREAMS} streams that follow a schema, preset {served_streams['preset']}"
    without = f"the same streams without: {statistics.median(served_streams['plain']) * 1e3:.2f} ms"
    found.append(claim(name, times, "x", MOST_TPOT_RATIO, peer=without))
    if any(row["library"] == Peer.name for row in rows):
        times = of(Ours.name, parts[0]) / of(Peer.name, parts[0])
        found.append(claim(f"compiling the {size}, beside {Peer.name}", times, "x", 1.0, peer=Peer.name))
    if "suite" in facts:
        found.append(
            claim(
                "instances that a suite calls invalid, and are accepted",
                facts["suite"]["wrongly accepted"],
                "instances",
                0,
            )
        )
    return found


def main() -> int:
    options = parser(__doc__, quick="two vocabularies, short texts and few rounds", rounds=9, seed=True)
    options.add_argument("--peer", type=Path, metavar="FOLDER", help="where xgrammar is installed")
    options.add_argument(
        "--suite", type=Path, metavar="FOLDER", help="JSON files of a JSON Schema test suite"
    )
    arguments = options.parse_args()
    if arguments.peer is not None:
        sys.path.append(str(arguments.peer))
    libraries: list[type[Ours] | type[Peer]] = [Ours]
    try:
        import xgrammar  # noqa: F401
    except ImportError:
        progress("xgrammar is not installed, so it is left out")
    else:
        libraries.append(Peer)
    tokens = 150 if arguments.quick else 600
    loop, rows = Loop(), list[Row]()
    for name, size in VOCABULARIES.items():
        if arguments.quick and name == "small":
            continue
        vocabulary = Vocabulary(size, arguments.seed)
        for kind in libraries:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            reading, library = seconds_of(lambda kind=kind, vocabulary=vocabulary: kind(vocabulary))
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            for schema_name, schema in SCHEMAS.items():
                progress(f"  {kind.name}, {size} tokens, {schema_name} schema")
                found = measure(library, vocabulary, schema, tokens)
                facts = {"library": kind.name, "vocabulary": size, "schema": schema_name}
                rows.append({**facts, "vocabulary_seconds": reading, "vocabulary_bytes": grown, **found})
                loop.sample()
    table(
        (
            "library, vocabulary, schema",
            "compile ms",
            "mask us",
            "99 %",
            "longest",
            *(f"step of {n}, us" for n in STREAMS),
        ),
        (
            (
                f"{row['library']}, {row['vocabulary']}, {row['schema']}",
                row["compile_seconds"] * 1e3,
                *(row[f"mask_{part}_seconds"] * 1e6 for part in ("median", "p99", "longest")),
                *(row["step_seconds_by_streams"][str(n)] * 1e6 for n in STREAMS),
            )
            for row in rows
        ),
    )
    differ = not are_equal_on_threads(Vocabulary(4096, arguments.seed), SCHEMAS["large"])
    facts: Row = {"rows": rows, "threads_that_differ": int(differ)}
    progress(f"  {SERVED_STREAMS} streams with and without a schema")
    rounds, length = (min(arguments.rounds, 2), 60) if arguments.quick else (arguments.rounds, 400)
    facts["served"] = measure_tpot(rounds, length, SERVED_PRESET)
    if arguments.suite is not None:
        facts["suite"] = check_suite(arguments.suite)
        print({name: count for name, count in facts["suite"].items() if name != "wrong"})
    return report(claims(rows, loop, facts), arguments.json, facts)


if __name__ == "__main__":
    exit_with(main)

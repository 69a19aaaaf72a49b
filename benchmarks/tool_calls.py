"""Function calling: what it costs to find calls in an output, and what a grammar of strict functions costs beside free text.

The masks of a text are computed without a grammar's calls and with 20 strict functions beside it, in each form of calls. All
texts are followed with the same vocabulary of 131,072 tokens, which are made, not learned.

    python benchmarks/tool_calls.py
    python benchmarks/tool_calls.py --quick
"""

from __future__ import annotations

import statistics

import numpy as np
from grammar import VOCABULARIES, Vocabulary, seconds_of, small_schema
from harness import LOOPS, Loop, Row, claim, exit_with, parser, progress, report, table
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from medha.wire.grammar_limits import PARSER_LIMITS
from medha_router.channels import CHANNEL, MESSAGE
from medha_router.tool_formats import FORMATS
from medha_router.tool_grammar import CallsGrammar

FUNCTIONS = 20
SENTENCE = "Let me see what <b>bana</b> and lobo have, [1] and then I will call a function; 2 < 3.\n"
TOKENS = 100
HEADERS = {"harmony": f"{CHANNEL}final{MESSAGE}"}
"""Text that begins an answer in forms whose outputs are messages."""


def followed(library: LLTokenizer, lark: str, ids: list[int]) -> Row:
    """Compile a grammar and compute the mask before each token."""
    limits = LLParserLimits(**PARSER_LIMITS._asdict())
    compiling, matcher = seconds_of(lambda: LLMatcher(library, lark, log_level=0, limits=limits))
    words = np.zeros(-(-library.vocab_size // 32), dtype=np.int32)
    masks = []
    for token in ids:
        masks.append(seconds_of(lambda: matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes))[0])
        if not words[token // 32] >> (token % 32) & 1:
            raise AssertionError(f"token {token} of a free text is masked")
        matcher.consume_token(token)
    return {
        "compile_seconds": compiling,
        "mask_median_seconds": statistics.median(masks),
        "mask_mean_seconds": statistics.mean(masks),
        "mask_longest_seconds": max(masks),
    }


def read_seconds(name: str, text: str) -> float:
    """Return the seconds for each character in which a reader looks for calls, a few characters at a time."""
    reader = FORMATS[name].reader({})

    def read() -> None:
        for start in range(0, len(text), 4):
            reader.feed(text[start : start + 4])

    return seconds_of(read)[0] / len(text)


def main() -> int:
    arguments = parser(__doc__, quick="a short text", seed=True).parse_args()
    text = SENTENCE * (8 if arguments.quick else 60)
    loop, rows = Loop(), list[Row]()
    vocabulary = Vocabulary(VOCABULARIES["large"], arguments.seed)
    library = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[0])
    for name, form in FORMATS.items():
        progress(f"  {name}")
        functions = [(f"function_{number}", small_schema()) for number in range(FUNCTIONS)]
        lark = CallsGrammar(form, functions, one_call=False, may_answer=True).lark({})
        ids = vocabulary(HEADERS.get(name, "") + text)
        reading = min(read_seconds(name, text) for _ in range(3))
        rows.append(
            {"form": name, "text_tokens": len(ids), **followed(library, lark, ids), "read_seconds": reading}
        )
        loop.sample()
    table(
        ("form of calls", "compile ms", "mask us", "mean us", "longest us", "read a character, us"),
        (
            (
                row["form"],
                row["compile_seconds"] * 1e3,
                *(row[f"mask_{part}_seconds"] * 1e6 for part in ("median", "mean", "longest")),
                row["read_seconds"] * 1e6,
            )
            for row in rows
        ),
    )

    def worst(part: str, count: int) -> float:
        return loop.ratio(max(row[part] for row in rows) * count)

    beside = f"beside {FUNCTIONS} strict functions, {VOCABULARIES['large']} tokens"
    common, mean = worst("mask_median_seconds", TOKENS), worst("mask_mean_seconds", 1)
    found = [
        claim(f"masks of {TOKENS} tokens of text {beside}, median", common, LOOPS, 0.5, peer=loop.peer()),
        claim("the mask of a token of that text, mean", mean, LOOPS, 0.5, peer=loop.peer()),
        claim("looking for calls in 10,000 characters", worst("read_seconds", 10_000), LOOPS, 10, peer=loop.peer()),
    ]  # fmt: skip
    return report(found, arguments.json, {"rows": rows})


if __name__ == "__main__":
    exit_with(main)

"""Generate workloads, or read them from traces.

Everything random comes from one seed, split into independent streams (`SeedSequence.spawn`), and arrival gaps
are drawn at rate one and then divided by the rate. Runs with equal seeds can therefore be compared in pairs:
at another load the same requests arrive in the same order, only more densely; with more long requests in the
mix, all short ones that remain are the same; and every policy sees exactly the same workload.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

import numpy as np
import numpy.typing as npt

from medha.errors import ConfigInvalid
from medha_sim.lengths import MEDHA_SWE, SHAREGPT, Counts, Lengths
from medha_sim.simulation import Arrival, FollowUp, Workload

LONG_TOKENS = 100_000
"""Prompt length from which a request of a trace is called long in reports (the shortest of Medha-SWE)."""

DEFAULT_CLASS = "default"
"""Service class of a request that names none: the replica's first class, whatever its name."""

_MOST_REQUESTS = 5_000_000  # in one run; takes some GB of memory, and hours
_MOST_TOKENS = 2**31 - 1  # largest maxModelLen
_BEYOND = "\0"  # key of the cells of a row that have no column

_WORK_SAMPLE = 20_000  # requests over which the mean work of a mix is computed
_WORK_SEED = 20250101


@dataclass(frozen=True, slots=True)
class Targets:
    """Deadlines (docs/design.md#deadlines): TTFT within max(floor, factor * isolated prefill), and a TPOT target.

    The fields are those of the first service class; `of_class` has the targets of each class by name, first
    class first.
    """

    prefill_seconds: Callable[[Counts], npt.NDArray[np.float64]]  # isolated, without cached tokens
    ttft_floor_seconds: float = 2.0
    ttft_factor: float = 3.0
    tpot_seconds: float = 0.05
    of_class: Mapping[str, Targets] = field(default_factory=dict)

    def ttft_seconds(self, prompt_tokens: Counts) -> npt.NDArray[np.float64]:
        return np.maximum(self.ttft_floor_seconds, self.ttft_factor * self.prefill_seconds(prompt_tokens))


@dataclass(frozen=True, slots=True)
class Part:
    """A kind of request in a mix."""

    kind: str
    lengths: Lengths
    share: float  # of all requests


@dataclass(frozen=True, slots=True)
class Mix:
    """Kinds of requests whose shares add up to 1."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        total = sum(part.share for part in self.parts)
        if abs(total - 1) > 1e-9 or any(part.share < 0 for part in self.parts):
            shares = ", ".join(f"{part.kind} {part.share:g}" for part in self.parts)
            raise ConfigInvalid(f"the shares of a mix are {shares}; they must be positive and add up to 1")

    def sample(
        self, count: int, generators: Sequence[np.random.Generator]
    ) -> tuple[npt.NDArray[np.int64], Counts, Counts]:
        """Draw kind (index of its part), prompt and output tokens of `count` requests, int64 [count] each.

        `generators`: one for the kinds, and one for each part.
        """
        # The smallest random numbers belong to the last part, so that a request of that part stays in it if the share grows.
        shares = np.cumsum([part.share for part in reversed(self.parts)])
        uniform = generators[0].random(count)
        kinds = len(self.parts) - 1 - np.searchsorted(shares[:-1], uniform, side="right")
        prompts, outputs = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for index, part in enumerate(self.parts):
            mine = kinds == index
            # All rows are drawn, so that the n-th request of a kind does not depend on the others' kinds.
            prompt, output = part.lengths.sample(count, generators[1 + index])
            prompts[mine], outputs[mine] = prompt[mine], output[mine]
        return kinds, prompts, outputs

    def mean_work_seconds(self, prefill_seconds: Callable[[Counts], npt.NDArray[np.float64]]) -> float:
        """Return the mean isolated prefill time of a request, over a large fixed sample."""
        mean = 0.0
        for part in self.parts:
            prompts, _ = part.lengths.sample(_WORK_SAMPLE, np.random.default_rng(_WORK_SEED))
            mean += part.share * float(np.mean(prefill_seconds(prompts)))
        return mean


def sharegpt_with_long(long_share: float, long: Lengths = MEDHA_SWE) -> Mix:
    """Return ShareGPT-like requests with a share of long ones; 0.05 is the papers' mix."""
    return Mix((Part("short", SHAREGPT, 1 - long_share), Part("long", long, long_share)))


def gaps(count: int, coefficient_of_variation: float, generator: np.random.Generator) -> list[float]:
    """Draw times between arrivals at rate one, from a gamma distribution.

    A coefficient of variation of 1 makes them exponential, above 1 bursty, and 0 all equal.
    """
    if coefficient_of_variation == 0:
        return [1.0] * count
    shape = 1 / coefficient_of_variation**2
    sampled: list[float] = generator.gamma(shape, 1 / shape, count).tolist()
    return sampled


def generate(
    mix: Mix,
    targets: Targets,
    *,
    rate: float,
    duration_seconds: float,
    seed: int,
    coefficient_of_variation: float = 1.0,
    names_max_tokens: bool = True,
) -> Workload:
    """Generate independent requests at `rate` a second for `duration_seconds`.

    With `names_max_tokens`, a client's `max_tokens` is the output's length, so KV is reserved exactly;
    otherwise it sets none, and the replica reserves what its service class specifies.

    Raises:
        ConfigInvalid: the rate or the duration is not a positive number, or they make too many requests.
    """
    _require_positive("rate", rate, "requests a second")
    _require_positive("duration", duration_seconds, "seconds")
    clock, *samplers = _generators(seed, 2 + len(mix.parts))
    times = _times(rate, duration_seconds, coefficient_of_variation, clock)
    kinds, prompts, outputs = mix.sample(len(times), samplers)
    names = [mix.parts[kind].kind for kind in kinds]
    return Workload(_arrivals(times, names, prompts, outputs, targets, names_max_tokens=names_max_tokens))


def varied(workload: Workload, knots: Sequence[tuple[float, float]]) -> Workload:
    """Return the same requests at other times, so that their rate follows `knots`: (seconds, relative rate), ascending.

    The rate is linear between knots. All requests arrive between the first and the last knot.
    """
    at, rate = (np.array(column, dtype=np.float64) for column in zip(*knots, strict=True))
    arrived = np.concatenate([[0.0], np.cumsum(np.diff(at) * (rate[1:] + rate[:-1]) / 2)])
    # Fine steps, because the sum of a linear rate is quadratic.
    fine = np.linspace(at[0], at[-1], 10_001)
    before = np.searchsorted(at, fine, side="right").clip(1, len(at) - 1) - 1
    since = fine - at[before]
    slope = np.diff(rate) / np.diff(at)
    share = (arrived[before] + since * (rate[before] + slope[before] * since / 2)) / arrived[-1]
    last = max((arrival.at_seconds for arrival in workload.arrivals), default=0.0)
    moved = np.interp([arrival.at_seconds / max(last, 1e-9) for arrival in workload.arrivals], share, fine)
    arrivals = [
        replace(one, at_seconds=float(when)) for one, when in zip(workload.arrivals, moved, strict=True)
    ]
    return replace(workload, arrivals=arrivals)


def conversations(
    targets: Targets,
    *,
    rate: float,
    duration_seconds: float,
    seed: int,
    mean_turns: float = 4.0,
    mean_think_seconds: float = 20.0,
    first: Lengths = SHAREGPT,
    most_tokens: int = 100_000,
) -> Workload:
    """Generate `rate` conversations a second; a turn's prompt is the conversation so far and a new question.

    The number of turns is geometric, thinking times are exponential. A later turn that would make the context
    longer than `most_tokens` is left out, with all turns after it.
    """
    _require_positive("rate", rate, "conversations a second")
    _require_positive("duration", duration_seconds, "seconds")
    if not (isfinite(mean_turns) and mean_turns >= 1):
        raise ConfigInvalid(f"mean turns is {mean_turns:g}; a conversation has at least 1")
    clock, lengths, thinking = _generators(seed, 3)
    arrivals: list[Arrival] = []
    follow_ups: dict[str, FollowUp] = {}
    for index, at in enumerate(_times(rate, duration_seconds, 1.0, clock)):
        turns = int(thinking.geometric(1 / mean_turns))
        questions, answers = first.sample(turns, lengths)
        contexts = np.cumsum(questions) + np.concatenate(([0], np.cumsum(answers)[:-1]))
        ttft = targets.ttft_seconds(contexts)
        before = ""
        for turn in range(turns):
            if turn > 0 and contexts[turn] + answers[turn] > most_tokens:
                break
            arrival = Arrival(
                id=f"c{index}.{turn}",
                at_seconds=at if turn == 0 else 0.0,
                prompt_tokens=int(contexts[turn]),
                output_tokens=int(answers[turn]),
                ttft_target_seconds=float(ttft[turn]),
                tpot_target_seconds=targets.tpot_seconds,
                kind="first turn" if turn == 0 else "later turn",
                max_tokens=int(answers[turn]),
                conversation=f"c{index}",
            )
            if turn == 0:
                arrivals.append(arrival)
            else:
                follow_ups[before] = FollowUp(float(thinking.exponential(mean_think_seconds)), arrival)
            before = arrival.id
    return Workload(arrivals, follow_ups)


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """Names of the columns of a CSV trace. Without an arrival column, `rate` must be given."""

    arrived_at: str | None = "arrived_at"
    prompt_tokens: str = "num_prefill_tokens"
    output_tokens: str = "num_decode_tokens"
    service_class: str | None = None  # if None, or for an empty cell, the first class


def read_trace(
    path: Path,
    targets: Targets,
    *,
    columns: TraceColumns | None = None,
    rate: float | None = None,
    duration_seconds: float | None = None,
    seed: int = 0,
    long_tokens: int = LONG_TOKENS,
    max_model_len: int = _MOST_TOKENS,
    coefficient_of_variation: float = 1.0,
    names_max_tokens: bool = True,
) -> Workload:
    """Read the requests of a CSV file with a header, in order of time.

    `rate` scales the trace's times to that mean rate, or draws arrivals if the trace has no times; `seed` and
    `coefficient_of_variation` only affect drawn arrivals. Deadlines are those of each row's service class.
    Arrivals after `duration_seconds` are left out. `names_max_tokens` is as for `generate`.

    Raises:
        ConfigInvalid: the file, a column or a cell is invalid, also if a prompt leaves no token of
            `max_model_len` or an output is longer than that; the error names the file, and the line and
            column of a cell.
    """
    columns = columns or TraceColumns()
    if rate is not None:
        _require_positive("rate", rate, "requests a second")
    rows = _rows(path, columns)
    prompts = _column(rows, columns.prompt_tokens, path, max_model_len - 1, max_model_len)
    outputs = _column(rows, columns.output_tokens, path, max_model_len, max_model_len)
    classes = _classes(rows, columns.service_class, path, targets)
    if columns.arrived_at is None:
        if rate is None:
            raise ConfigInvalid(f"{path} is read without a column of arrival times; give a rate (--rate)")
        times = np.cumsum(gaps(len(rows), coefficient_of_variation, _generators(seed, 1)[0])) / rate
    else:
        times = np.array([_number(row, columns.arrived_at, path, line) for line, row in rows])
        order = np.argsort(times, kind="stable")
        times, prompts, outputs = times[order] - times[order[0]], prompts[order], outputs[order]
        classes = [classes[row] for row in order]
        if rate is not None:
            if times[-1] <= 0:
                raise ConfigInvalid(f"{path}: all requests arrive at once, so the trace has no rate to scale")
            times *= (len(rows) - 1) / times[-1] / rate
    kept = int(np.searchsorted(times, np.inf if duration_seconds is None else duration_seconds, side="right"))
    names = ["long" if tokens >= long_tokens else "short" for tokens in prompts[:kept]]
    return Workload(
        _arrivals(
            times[:kept].tolist(),
            names,
            prompts[:kept],
            outputs[:kept],
            targets,
            names_max_tokens=names_max_tokens,
            classes=classes,
        )
    )


def _rows(path: Path, columns: TraceColumns) -> list[tuple[int, dict[str, str]]]:
    """Return each (line, row) of a CSV file that has the columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # -sig: spreadsheets write a BOM
            reader = csv.DictReader(file, restkey=_BEYOND)
            found = reader.fieldnames or []
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigInvalid(f"{path}: cannot be read as CSV: {error}") from error
    for name in (columns.arrived_at, columns.prompt_tokens, columns.output_tokens, columns.service_class):
        if name is not None and name not in found:
            raise ConfigInvalid(
                f"{path}: has no column {name!r}; it has {', '.join(map(repr, found)) or 'none'}. Name the columns "
                "to use, e.g. --columns arrived_at,num_prefill_tokens,num_decode_tokens"
            )
    if not rows:
        raise ConfigInvalid(f"{path}: has a header and no rows")
    for line, row in rows:
        beyond: Sequence[str] = row.get(_BEYOND, ())
        if any(beyond):  # a trailing comma makes an empty one
            raise ConfigInvalid(
                f"{path}:{line}: the row has {len(found) + len(beyond)} cells for {len(found)} columns; quote a cell that "
                "holds a comma, or leave the row out"
            )
    return rows


def _column(
    rows: list[tuple[int, dict[str, str]]], name: str, path: Path, most: int, max_model_len: int
) -> Counts:
    """Return the token counts of a column; below 1 or above `most` is an error, and fractions are rounded."""
    values = np.array([_number(row, name, path, line) for line, row in rows])
    wrong = np.flatnonzero((values < 1) | (values > most))
    if len(wrong):
        line, row = rows[int(wrong[0])]
        fix = (
            "a request has at least 1 token; leave the row out"
            if values[wrong[0]] < 1
            else f"the replicas' maxModelLen is {max_model_len}, which leaves room for {most}; leave the row out, or "
            "simulate a manifest with a larger spec.model.maxModelLen"
        )
        raise ConfigInvalid(f"{path}:{line}: {name} is {row[name]}; {fix}")
    counts: Counts = np.rint(values).astype(np.int64)
    return counts


def _classes(
    rows: list[tuple[int, dict[str, str]]], name: str | None, path: Path, targets: Targets
) -> list[str]:
    """Return the service class of each row; an empty cell and "default" mean the first class."""
    if name is None:
        return [DEFAULT_CLASS] * len(rows)
    known = tuple(targets.of_class) or (DEFAULT_CLASS,)
    classes = []
    for line, row in rows:
        found = (row[name] or "").strip()  # None if the row is too short
        if found in ("", DEFAULT_CLASS):
            found = known[0]
        if found not in known:
            raise ConfigInvalid(
                f"{path}:{line}: {name} is {found!r}; the service classes are {', '.join(known)}. Correct the cell, or "
                "simulate a manifest whose spec.serviceClasses has it"
            )
        classes.append(found)
    return classes


def _number(row: dict[str, str], name: str, path: Path, line: int) -> float:
    text: str | None = row[name]
    if text is None:
        raise ConfigInvalid(f"{path}:{line}: the row ends before {name}; complete it, or leave it out")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ConfigInvalid(
            f"{path}:{line}: {name} is {text!r}, which is no number; correct the cell, or leave the row out"
        )
    return value


def _arrivals(
    times: Sequence[float],
    kinds: Sequence[str],
    prompts: Counts,
    outputs: Counts,
    targets: Targets,
    *,
    names_max_tokens: bool,
    classes: Sequence[str] = (),
) -> list[Arrival]:
    """Build arrivals; `classes` has each request's class, or is empty if all are of the default class."""
    of_class = {name: targets.of_class.get(name, targets) for name in {*classes, DEFAULT_CLASS}}
    ttft = {name: mine.ttft_seconds(prompts) for name, mine in of_class.items()}
    classes = classes or [DEFAULT_CLASS] * len(times)
    return [
        Arrival(
            id=f"{kinds[index]}-{index}",
            at_seconds=times[index],
            prompt_tokens=int(prompts[index]),
            output_tokens=int(outputs[index]),
            ttft_target_seconds=float(ttft[classes[index]][index]),
            tpot_target_seconds=of_class[classes[index]].tpot_seconds,
            kind=kinds[index],
            service_class=classes[index],
            max_tokens=int(outputs[index]) if names_max_tokens else None,
        )
        for index in range(len(times))
    ]


def _times(rate: float, duration_seconds: float, variation: float, clock: np.random.Generator) -> list[float]:
    """Draw arrival times below `duration_seconds`; a longer duration only appends, a higher rate also divides them."""
    if rate * duration_seconds > _MOST_REQUESTS:
        raise ConfigInvalid(
            f"rate is {rate:g} a second for {duration_seconds:g} s, which makes {rate * duration_seconds:g} requests; "
            f"lower one of them, so that there are at most {_MOST_REQUESTS:,}"
        )
    times: list[float] = []
    at = 0.0
    while True:
        for gap in gaps(256, variation, clock):
            at += gap
            if at / rate >= duration_seconds:
                return times
            times.append(at / rate)


def _generators(seed: int, count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]


def _require_positive(name: str, value: float, unit: str) -> None:
    if not (isfinite(value) and value > 0):
        raise ConfigInvalid(f"{name} is {value:g} {unit}; it must be a positive number")

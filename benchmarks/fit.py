"""Fit the fractions of a data sheet that Vidur's measurements reach, and write `core/medha/cost/fitted_hardware.py`.

    python benchmarks/fit.py --data DIR            fit all, print held-out errors, write the fitted figures
    python benchmarks/fit.py --data DIR --quick    one model and one link of each kind, nothing is written
    python benchmarks/fit.py --data DIR --json F   also write every error to F

DIR holds `compute/*_mlp.csv` and `network/*_{all_reduce,send_recv}.csv` of github.com/microsoft/vidur (MIT),
`data/profiling`. An error is the mean absolute percentage error over a whole range of tokens (or bytes) that the fit
has not seen. To hold out random rows would only test interpolation.
"""

from __future__ import annotations

import csv
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import ROOT, Row, claim, exit_with, parser, report, write

from medha.cost.cost_profile import Link, Operation
from medha.cost.hardware import A100, H100, LLAMA3_8B, LLAMA3_70B, Hardware, ModelShape, layer_operations

TARGET = ROOT / "core" / "medha" / "cost" / "fitted_hardware.py"
GOAL_PERCENT = 5.0

Floats = npt.NDArray[np.float64]

# Vidur has no profile of Llama-3 on H100; Llama-2 70B has the same layers as Llama-3 70B.
COMPUTE = (
    ("a100_llama3_8b", A100, LLAMA3_8B),
    ("a100_llama3_70b", A100, LLAMA3_70B),
    ("h100_llama2_70b", H100, LLAMA3_70B),
)
NETWORK = (
    ("a100_dgx_all_reduce", A100, "all_reduce"),
    ("a100_dgx_send_recv", A100, "send_recv"),
    ("h100_dgx_all_reduce", H100, "all_reduce"),
    ("h100_dgx_send_recv", H100, "send_recv"),
)
COLUMNS = {
    "qkv": "attn_pre_proj",
    "output": "attn_post_proj",
    "gate_up": "mlp_up_proj",
    "down": "mlp_down_proj",
    "norm": "input_layernorm",
    "rope": "attn_rope",
    "activation": "mlp_act",
    "residual": "add",
}
"""Vidur's column for each of our operations. It is for one norm and for one residual addition; a layer has two of each."""
GEMMS = ("qkv", "output", "gate_up", "down")
TOKEN_RANGES = ((1, 64), (65, 512), (513, 2048), (2049, 4096), (4097, 16384), (16385, 10**9))
EVERYTHING = (0, 10**9)
BYTE_RANGES = ((1, 2**18), (2**18 + 1, 2**21), (2**21 + 1, 2**24), (2**24 + 1, 10**12))
WAVES = 0
TILES = (1, 64, 128, WAVES)
"""The numbers of rows that matrix products may be padded to. `WAVES` is whole waves of `medha.cost.hardware.MATRIX_TILES`."""
PRIOR_WEIGHT = 0.005
"""The weight of the usual fractions: too small to outweigh many measured rows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The measurements of one operation: rows and median seconds, beside the ideal times of the data sheet."""

    ideal: Operation  # at full peak and bandwidth, no launch
    rows: Floats
    seconds: Floats


def main() -> int:
    options = parser(__doc__, quick="a part of the fits; fitted_hardware.py is not written")
    text = "folder with compute/ and network/"
    options.add_argument("--data", type=Path, required=True, metavar="DIR", help=text)
    arguments = options.parse_args()
    compute = COMPUTE[:1] if arguments.quick else COMPUTE
    network = NETWORK[2:] if arguments.quick else NETWORK
    files = [f"compute/{name}_mlp.csv" for name, _, _ in compute] + [
        f"network/{name}.csv" for name, _, _ in network
    ]
    missing = [name for name in files if not (arguments.data / name).is_file()]
    if missing:
        print(
            f"fit: {arguments.data} lacks {', '.join(missing)}; see --help for where they come from",
            file=sys.stderr,
        )
        return 2

    measured = {
        (hardware.name, model.name): _read_compute(
            arguments.data / f"compute/{name}_mlp.csv", hardware, model
        )
        for name, hardware, model in compute
    }
    tiles = {name: _best_tile(measured, name) for name in dict.fromkeys(key[0] for key in measured)}
    links = [
        _read_network(arguments.data / f"network/{name}.csv", hardware, kind)
        for name, hardware, kind in network
    ]
    errors: dict[str, Any] = {"goal_percent": GOAL_PERCENT, "tile_rows": tiles}
    errors["layers"] = list(_layer_errors(measured, tiles))
    errors["other_model"] = list(_transfer_errors(measured, tiles))
    errors["links"] = [row for group in links for row in _link_errors(group)]
    digests = {name: hashlib.sha256((arguments.data / name).read_bytes()).hexdigest() for name in files}
    errors["sha256"] = digests
    _print(errors)
    if not arguments.quick:
        _write(measured, tiles, links, digests)
        print(f"\nwrote {TARGET.relative_to(ROOT)}")
    return report(_claims(errors), arguments.json, errors)


# --- linear and elementwise operations --------------------------------------------------------------------


def _read_compute(path: Path, hardware: Hardware, model: ModelShape) -> dict[int, dict[str, Shape]]:
    """Return the measurements of a file, by tensor parallelism and operation."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    shapes: dict[int, dict[str, Shape]] = {}
    for tensor in sorted({int(row["num_tensor_parallel_workers"]) for row in rows}):
        chosen = [row for row in rows if int(row["num_tensor_parallel_workers"]) == tensor]
        tokens = np.array([float(row["num_tokens"]) for row in chosen])
        ideal = {operation.name: operation for operation in layer_operations(model, hardware, tensor)}
        shapes[tensor] = {
            name: Shape(
                ideal[name],
                tokens,
                np.array([float(row[f"time_stats.{column}.median"]) * 1e-3 for row in chosen]),
            )
            for name, column in COLUMNS.items()
        }
    return shapes


@dataclass(frozen=True, slots=True)
class Fraction:
    """The fractions of peak and bandwidth that an operation reaches, and the time of its launch."""

    efficiency: float
    bandwidth: float
    launch_seconds: float

    def seconds(self, ideal: Operation, rows: Floats, tile: int) -> Floats:
        compute, memory = _terms(ideal, rows, tile)
        return self.launch_seconds + np.maximum(compute / self.efficiency, memory / self.bandwidth)


def _terms(ideal: Operation, rows: Floats, tile: int) -> tuple[Floats, Floats]:
    if tile == WAVES:
        compute = ideal.compute_seconds(rows)
    else:
        compute = np.ceil(rows / tile) * tile * ideal.compute_seconds_per_row
    return compute, ideal.fixed_seconds + rows * ideal.memory_seconds_per_row


def _fit(shapes: list[Shape], tile: int, kept: npt.NDArray[np.bool_] | None = None) -> Fraction:
    """Return the fractions with the least mean absolute error of logarithms over the kept rows of `shapes`."""
    compute, memory, seconds = [], [], []
    for shape in shapes:
        mask = np.ones(len(shape.rows), bool) if kept is None else kept
        terms = _terms(shape.ideal, shape.rows[mask], tile)
        compute.append(terms[0])
        memory.append(terms[1])
        seconds.append(shape.seconds[mask])
    a, b, y = np.concatenate(compute), np.concatenate(memory), np.concatenate(seconds)

    # Factors of the times at peak and at full bandwidth; microseconds of a launch.
    usual = np.log([1.4, 1.2, 4.0])

    def error(x: Floats) -> float:
        slower = np.exp(x)
        predicted = slower[2] * 1e-6 + np.maximum(a * slower[0], b * slower[1])
        doubt = PRIOR_WEIGHT * float(np.sum((x - usual) ** 2))  # decides what the kept rows leave open
        return float(np.mean(np.abs(np.log(predicted / y)))) + doubt

    slower = np.exp(_minimise(error, usual))
    efficiency = 1 / slower[0] if a.any() else 1.0
    return Fraction(efficiency, 1 / slower[1], slower[2] * 1e-6)


def _minimise(function: Callable[[Floats], float], start: Floats, rounds: int = 300) -> Floats:
    """Return a minimum by Nelder and Mead's downhill simplex, which needs no derivative and no library."""
    count = len(start)
    points = [start, *(start + 0.25 * unit for unit in np.eye(count))]
    values = [function(point) for point in points]
    for _ in range(rounds):
        order = np.argsort(values, kind="stable")
        points, values = [points[i] for i in order], [values[i] for i in order]
        centre = np.mean(points[:-1], axis=0)
        away = centre - points[-1]
        for stretch in (2.0, 1.0, 0.5, -0.5):
            tried = centre + stretch * away
            value = function(tried)
            if value < (values[0] if stretch == 2.0 else values[-2]):
                points[-1], values[-1] = tried, value
                break
        else:
            points = [points[0], *((points[0] + point) / 2 for point in points[1:])]
            values = [values[0], *(function(point) for point in points[1:])]
    return points[int(np.argmin(values))]


Measured = dict[tuple[str, str], dict[int, dict[str, Shape]]]


def _best_tile(measured: Measured, hardware: str) -> int:
    """Return the padding that predicts the sum of a layer's matrix products best.

    A step takes this sum, so the products are not compared one by one.
    """

    def error(tile: int) -> float:
        errors = []
        for (name, _), tensors in measured.items():
            for operations in tensors.values() if name == hardware else ():
                predicted, actual = {}, {}
                for operation in GEMMS:
                    shape = operations[operation]
                    predicted[operation] = _fit([shape], tile).seconds(shape.ideal, shape.rows, tile)
                    actual[operation] = shape.seconds
                errors.append(_sum_error(predicted, actual, GEMMS))
        return float(np.mean(errors))

    return min(TILES, key=error)


def _layer_errors(measured: Measured, tiles: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the errors for each model, hardware and TP: with all rows seen, then with each range held out in turn."""
    for (hardware, model), tensors in measured.items():
        tile = tiles[hardware]
        for tensor, operations in tensors.items():
            rows = operations["qkv"].rows
            for low, high in (EVERYTHING, *TOKEN_RANGES):
                held = (rows >= low) & (rows <= high)
                if not held.any():
                    continue
                predicted = {}
                for name, shape in operations.items():
                    fraction = _fit([shape], tile, held if (low, high) == EVERYTHING else ~held)
                    seconds = fraction.seconds(shape.ideal, shape.rows[held], tile)
                    predicted[name] = shape.ideal.times * seconds
                actual = {name: shape.ideal.times * shape.seconds[held] for name, shape in operations.items()}
                yield {
                    "hardware": hardware,
                    "model": model,
                    "tensor": tensor,
                    "tokens": [low, min(high, int(rows.max()))],
                    "rows": int(held.sum()),
                    "gemm_percent": _sum_error(predicted, actual, GEMMS),
                    "layer_percent": _sum_error(predicted, actual, tuple(COLUMNS)),
                    "repeats_percent": _repeats(operations, held),
                    "monotone_percent": _monotone_floor(operations, held),
                    "each_percent": {name: _sum_error(predicted, actual, (name,)) for name in COLUMNS},
                }


def _transfer_errors(measured: Measured, tiles: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the errors of pooled fractions on a model that they have not seen.

    Pooled fractions serve models that were never measured.
    """
    for (hardware, model), tensors in measured.items():
        others = [other for key, other in measured.items() if key[0] == hardware and key[1] != model]
        if not others:
            continue
        tile = tiles[hardware]
        pooled = {
            name: _fit([operations[name] for other in others for operations in other.values()], tile)
            for name in COLUMNS
        }
        for tensor, operations in tensors.items():
            predicted = {
                n: s.ideal.times * pooled[n].seconds(s.ideal, s.rows, tile) for n, s in operations.items()
            }
            actual = {name: shape.ideal.times * shape.seconds for name, shape in operations.items()}
            yield {
                "hardware": hardware,
                "model": model,
                "tensor": tensor,
                "gemm_percent": _sum_error(predicted, actual, GEMMS),
                "layer_percent": _sum_error(predicted, actual, tuple(COLUMNS)),
            }


def _sum_error(predicted: dict[str, Floats], actual: dict[str, Floats], names: tuple[str, ...]) -> float:
    ours = np.sum([predicted[name] for name in names], axis=0)
    theirs = np.sum([actual[name] for name in names], axis=0)
    return round(100 * float(np.mean(np.abs(ours / theirs - 1))), 2)


def _gemms(operations: dict[str, Shape], chosen: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the tokens in ascending order, and the seconds of the four matrix products together."""
    seconds = np.sum([operations[name].seconds[chosen] for name in GEMMS], axis=0)
    order = np.argsort(operations["qkv"].rows[chosen], kind="stable")
    return operations["qkv"].rows[chosen][order], seconds[order]


def _repeats(operations: dict[str, Shape], chosen: npt.NDArray[np.bool_]) -> float | None:
    """Return the mean difference of rows that were measured twice, in percent of the smaller; None without such rows."""
    rows, seconds = _gemms(operations, chosen)
    twice = np.flatnonzero(rows[1:] == rows[:-1])
    if not len(twice):
        return None
    pairs = np.stack([seconds[twice], seconds[twice + 1]])
    return round(100 * float(np.mean(pairs.max(axis=0) / pairs.min(axis=0) - 1)), 2)


def _monotone_floor(operations: dict[str, Shape], chosen: npt.NDArray[np.bool_]) -> float:
    """Return the error (percent) of the best curve that never falls with more tokens, fitted to these same rows."""
    _, seconds = _gemms(operations, chosen)
    return round(100 * float(np.mean(np.abs(_never_falling(seconds) / seconds - 1))), 2)


def _never_falling(values: Floats) -> Floats:
    """Return the isotonic regression of `values`, on their logarithms, by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []  # mean, members
    for value in np.log(values):
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, members = pools.pop()
            mean = (before * members + mean * count) / (members + count)
            count += members
        pools.append((mean, count))
    return np.exp(np.repeat([mean for mean, _ in pools], [count for _, count in pools]))


# --- links ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """Measurements of one collective among `workers` devices, `per_node` of them on each node."""

    hardware: str
    kind: str
    workers: int
    per_node: int
    sizes: Floats  # bytes
    seconds: Floats


def _read_network(path: Path, hardware: Hardware, kind: str) -> list[LinkGroup]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    shapes = sorted({(int(row["num_workers"]), int(row["devices_per_node"])) for row in rows})
    groups = []
    for workers, per_node in shapes:
        chosen = [
            r for r in rows if (int(r["num_workers"]), int(r["devices_per_node"])) == (workers, per_node)
        ]
        sizes = np.array([float(row["size"]) for row in chosen])
        seconds = np.array([float(row[f"time_stats.{kind}.median"]) * 1e-3 for row in chosen])
        groups.append(LinkGroup(hardware.name, kind, workers, per_node, sizes, seconds))
    return groups


def _fit_link(sizes: Floats, seconds: Floats) -> Link:
    """Fit one line, or the lower of two lines (NCCL takes the better of its protocols), above a floor.

    Two lines always fit better what they have seen. So they are taken only if, fitted to the smaller sizes, they predict
    the largest ones better.
    """
    large = sizes > sizes.max() / 4
    candidates = []
    for lines in (1, 2):
        foretold = _fit_lines(sizes[~large], seconds[~large], lines)
        candidates.append((_log_error(foretold, sizes[large], seconds[large]), lines))
    return _fit_lines(sizes, seconds, min(candidates)[1])


def _fit_lines(sizes: Floats, seconds: Floats, lines: int) -> Link:
    """Return the lines with the least mean absolute error of logarithms; each octave of sizes has the same weight."""
    octave = np.floor(np.log2(sizes)).astype(int)
    weight = 1.0 / np.bincount(octave)[octave]

    def link(x: Floats) -> Link:
        floor, latency, slope = np.exp(x[0]) * 1e-6, np.exp(x[1]) * 1e-6, np.exp(x[2]) * 1e-12
        first = (float(latency), float(slope))
        if lines == 1:
            return Link((first,), float(floor))
        # The second line starts higher and rises less.
        later, share = np.exp(x[3]) * 1e-6, 1 / (1 + np.exp(-x[4]))
        return Link((first, (float(latency + later), float(slope * share))), float(floor))

    def error(x: Floats) -> float:
        return _log_error(link(x), sizes, seconds, weight)

    starts = [
        np.array([np.log(floor), 3.0, np.log(slope), 5.3, 0.0])[: 2 * lines + 1]
        for slope in (5.0, 50.0, 500.0)
        for floor in (5.0, 30.0)
    ]
    return link(min((_minimise(error, start, 400) for start in starts), key=error))


def _log_error(link: Link, sizes: Floats, seconds: Floats, weight: Floats | None = None) -> float:
    return float(np.average(np.abs(np.log(link.seconds(sizes) / seconds)), weights=weight))


def _link_errors(groups: list[LinkGroup]) -> Iterator[dict[str, Any]]:
    for group in groups:
        whole = _fit_link(group.sizes, group.seconds)
        held_out = {}
        for low, high in BYTE_RANGES:
            held = (group.sizes >= low) & (group.sizes <= high)
            link = _fit_link(group.sizes[~held], group.seconds[~held])
            error = np.abs(link.seconds(group.sizes[held]) / group.seconds[held] - 1)
            held_out[f"{low - 1}-{min(high, int(group.sizes.max()))}"] = round(100 * float(error.mean()), 2)
        seen = np.abs(whole.seconds(group.sizes) / group.seconds - 1)
        ordered = group.seconds[np.argsort(group.sizes, kind="stable")]
        yield {
            "hardware": group.hardware,
            "kind": group.kind,
            "workers": group.workers,
            "per_node": group.per_node,
            "seen_percent": round(100 * float(seen.mean()), 2),
            "monotone_percent": round(100 * float(np.mean(np.abs(_never_falling(ordered) / ordered - 1))), 2),
            "held_out_percent": held_out,
        }


# --- output -----------------------------------------------------------------------------------------------


def _claims(errors: dict[str, Any]) -> list[Row]:
    """Return claims on the worst held-out errors, separately for matrix products and each collective."""
    worst: dict[str, float] = {}
    for row in errors["layers"]:
        low, high = row["tokens"]
        if low != EVERYTHING[0]:
            name = f"four matrix products, {row['hardware']}, {low} to {high} tokens held out, worst of all models and TP"
            worst[name] = max(worst.get(name, 0.0), row["gemm_percent"])
    for row in errors["links"]:
        name = f"{row['kind']}, {row['hardware']}, worst range of sizes held out"
        worst[name] = max(worst.get(name, 0.0), *row["held_out_percent"].values())
    return [claim(name, value, "%", GOAL_PERCENT) for name, value in worst.items()]


def _print(errors: dict[str, Any]) -> None:
    print(
        "Linear layers: MAPE (%) over a range of tokens that the fit has not seen; sum of the four GEMMs / whole layer"
    )
    ranges = ["all seen", *(f"{low}-{high if high < 10**9 else ''}" for low, high in TOKEN_RANGES)]
    print("| hardware | model | TP | " + " | ".join(ranges) + " |\n|" + " --- |" * (3 + len(ranges)))
    groups: dict[tuple[str, str, int], dict[int, str]] = {}
    for row in errors["layers"]:
        cells = groups.setdefault((row["hardware"], row["model"], row["tensor"]), {})
        cells[row["tokens"][0]] = f"{row['gemm_percent']:.1f} / {row['layer_percent']:.1f}"
    for (hardware, model, tensor), cells in groups.items():
        values = " | ".join(cells.get(low, "no data") for low, _ in (EVERYTHING, *TOKEN_RANGES))
        print(f"| {hardware} | {model} | {tensor} | {values} |")
    print(
        "\nWhat no curve that grows with the tokens can foretell (%): rows measured twice differ by / its best fit errs by"
    )
    print("| hardware | model | TP | " + " | ".join(ranges) + " |\n|" + " --- |" * (3 + len(ranges)))
    floors: dict[tuple[str, str, int], dict[int, str]] = {}
    for row in errors["layers"]:
        cells = floors.setdefault((row["hardware"], row["model"], row["tensor"]), {})
        twice = row["repeats_percent"]
        cells[row["tokens"][0]] = (
            f"{'-' if twice is None else f'{twice:.1f}'} / {row['monotone_percent']:.1f}"
        )
    for (hardware, model, tensor), cells in floors.items():
        values = " | ".join(cells.get(low, "no data") for low, _ in (EVERYTHING, *TOKEN_RANGES))
        print(f"| {hardware} | {model} | {tensor} | {values} |")
    if errors["other_model"]:
        print("\nA model that the fit has not seen at all, same hardware: GEMMs / whole layer (%)")
        for row in errors["other_model"]:
            print(
                f"{row['hardware']} {row['model']} TP{row['tensor']}: "
                f"{row['gemm_percent']:.1f} / {row['layer_percent']:.1f}"
            )
    print("\nLinks: MAPE (%) with all sizes seen, and with a range of sizes held out")
    names = ["<= 256 KiB", "256 KiB-2 MiB", "2-16 MiB", "16-64 MiB"]
    print(
        "| hardware | collective | devices (a node) | floor | seen | "
        + " | ".join(names)
        + " |\n|"
        + " --- |" * 9
    )
    for row in errors["links"]:
        values = " | ".join(f"{value:.1f}" for value in row["held_out_percent"].values())
        place = f"{row['workers']} ({row['per_node']})"
        print(
            f"| {row['hardware']} | {row['kind']} | {place} | {row['monotone_percent']:.1f} | {row['seen_percent']:.1f} | {values} |"
        )
    beyond = [row for row in errors["layers"] if row["tokens"][0] == TOKEN_RANGES[-1][0]]
    if beyond:
        worst = max(row["gemm_percent"] for row in beyond)
        print(
            f"\nGEMMs above 16K tokens: worst {worst:.1f} % of {len(beyond)} fits; goal {GOAL_PERCENT:.0f} %"
        )


def _write(
    measured: Measured, tiles: dict[str, int], links: list[list[LinkGroup]], digests: dict[str, str]
) -> None:
    lines = [
        '"""Fractions of the data sheets that are reached. Written by `benchmarks/fit.py`; do not edit.',
        "",
        "Source: profiles of github.com/microsoft/vidur (MIT), `data/profiling`. `SHA256` names the very files.",
        '"""',
        "",
        "SHA256: dict[str, str] = {",
        *(f'    "{name}": "{digest}",' for name, digest in digests.items()),
        "}",
        "",
        "TILE_ROWS: dict[str, int] = {",
        *(f'    "{name}": {tile},' for name, tile in tiles.items() if tile != WAVES),
        "}",
        '"""Rows that matrix products are padded to, by hardware."""',
        "",
        f"WHOLE_WAVES: tuple[str, ...] = ({''.join(f'{name!r},' for name, tile in tiles.items() if tile == WAVES)})",
        '"""Hardware whose matrix products take whole waves of tiles instead."""',
        "",
        "MEASURED: dict[tuple[str, str, int, str], tuple[float, float, float]] = {",
    ]
    pooled: dict[tuple[str, str], list[Shape]] = {}
    for (hardware, model), tensors in measured.items():
        for tensor, operations in tensors.items():
            for name, shape in operations.items():
                pooled.setdefault((hardware, name), []).append(shape)
                fraction = _fit([shape], tiles[hardware])
                lines.append(
                    f"    {(hardware, model, tensor, name)!r}: {_numbers(fraction)},".replace("'", '"')
                )
    lines += [
        "}",
        '"""(hardware, model, tensor parallelism, operation) -> (of peak FLOP/s, of bandwidth, launch seconds)."""',
        "",
        "POOLED: dict[tuple[str, str], tuple[float, float, float]] = {",
    ]
    for key, shapes in pooled.items():
        lines.append(f"    {key!r}: {_numbers(_fit(shapes, tiles[key[0]]))},".replace("'", '"'))
    lines += [
        "}",
        '"""(hardware, operation) -> the same, for shapes that were not measured."""',
        "",
        "LINKS: dict[tuple[str, str, int, int], tuple[float, tuple[tuple[float, float], ...]]] = {",
    ]
    for group in (group for groups in links for group in groups):
        link = _fit_link(group.sizes, group.seconds)
        pairs = " ".join(f"({latency:.3e}, {slope:.3e})," for latency, slope in link.lines)
        key4 = (group.hardware, group.kind, group.workers, group.per_node)
        lines.append(f"    {key4!r}: ({link.floor_seconds:.3e}, ({pairs})),".replace("'", '"'))
    lines += [
        "}",
        '"""(hardware, collective, devices, devices a node) -> floor (seconds), and lines (seconds, seconds a byte)."""',
        "",
    ]
    write(TARGET, "\n".join(lines))
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(TARGET)], check=True)


def _numbers(fraction: Fraction) -> str:
    return f"({fraction.efficiency:.4f}, {fraction.bandwidth:.4f}, {fraction.launch_seconds:.3e})"


if __name__ == "__main__":
    exit_with(main)

"""Measure the matrix products of a step's layers on a CPU: the compiled ones beside torch's, for few rows and many.

    python benchmarks/products.py --quick
    python benchmarks/products.py --json benchmarks/results/products.json

The products are those of several layers, whose weights together do not fit the processor's caches: of the `small`
preset, and of the shapes of Llama 3.2 1B. Rows are decodes up to 32, and a chunk from 128 on. All ways take turns in
each round:

* `compiled`  the kernels that a rank runs, on their own team of threads, by weights that are packed as a rank packs them;
* `openmp`    the same on the threads of torch's OpenMP, which wait for each other at the end of each product;
* `mm`        torch, by weights that are kept as [in, out];
* `linear`    torch, by weights that are kept as [out, in], as in transformers.

Everything is measured alone, and beside a process that always wants one core, as router and client do in turns. A claim
is the time of `compiled` over that of the faster of torch's ways, and beside the busy process over `openmp`, too. With
`--threads 1`, processor time is measured instead, on which other processes have less effect; then there is nothing to
compare teams by.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as `medha up` sets it for ranks; read when torch is loaded

import llvmlite.binding as llvm
import torch
from harness import Row, claim, exit_with, in_turn, parser, report, table
from llvmlite import ir

from medha_worker.kernels.cpu.compiled_products import CompiledProducts
from medha_worker.kernels.cpu.helper_team import HelperTeam, TeamFunction
from medha_worker.kernels.cpu.host_compiler import Compiled
from medha_worker.kernels.cpu.team_code import PART
from medha_worker.kernels.cpu.vector_code import INT32, INT64, POINTER, VOID, VectorBuilder

SHAPES = {  # layers, and each one's weights, [in, out]
    "small": (8, ((512, 768), (512, 512), (512, 2816), (1408, 512))),
    "Llama 3.2 1B": (2, ((2048, 3072), (2048, 2048), (2048, 16_384), (8192, 2048))),
}
ROWS = (1, 4, 8, 16, 32, 128, 512)
REPEATS = 3  # of which the median counts
WAYS = ("compiled", "openmp", "mm", "linear")
ALONE = ("compiled", "mm", "linear")  # of one thread


class OpenMPTeam(HelperTeam):
    """A team whose threads are those of torch's OpenMP; each computes a part of every call."""

    def __init__(self) -> None:
        super().__init__()
        (path,) = (Path(torch.__file__).parent / "lib").glob("libgomp*")
        library = ctypes.CDLL(str(path))
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._one = self._compiled()

    def grow(self, threads: int) -> int:
        return threads

    def function(self, compiled: Compiled, name: str) -> TeamFunction:
        address = compiled.address(name)

        def run(fields: Sequence[int], parts: int) -> None:
            call = array("q", fields)
            both = array("q", [address, call.buffer_info()[0]])
            threads = min(parts, torch.get_num_threads())
            self._parallel(self._one.address("one"), both.buffer_info()[0], threads, 0)

        return run

    @staticmethod
    def _compiled() -> Compiled:
        """Compile `one(both)`, by which a thread computes the part that has its number."""
        module = ir.Module("openmp_team")
        function = ir.Function(module, ir.FunctionType(VOID, [POINTER]), "one")
        code = VectorBuilder(function, 4)
        thread, threads = (
            code.sext(code.call(ir.Function(module, ir.FunctionType(INT32, []), name), []), INT64)
            for name in ("omp_get_thread_num", "omp_get_num_threads")
        )
        address, call = (code.one(function.args[0], field, INT64) for field in (0, 1))
        compute = code.inttoptr(address, PART.as_pointer())
        code.call(compute, [code.inttoptr(call, POINTER), thread, threads, thread])
        code.ret_void()
        return Compiled(module)


def spin() -> None:
    while True:
        pass


@contextmanager
def neighbour(*, busy: bool) -> Iterator[None]:
    """Run a process that always wants a core, if `busy`."""
    process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    if busy:
        process.start()
    try:
        yield
    finally:
        if busy:
            process.kill()
            process.join()


def median_seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(REPEATS):
        start = clock()
        run()
        taken.append(clock() - start)
    return statistics.median(taken)


def measure(shape: str, rows: int, rounds: int) -> dict[str, float]:
    """Return the seconds of each way's products, the median over the rounds."""
    layers, sizes = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*size, generator=generator) for _ in range(layers) for size in sizes]
    turned = [weight.t().contiguous() for weight in weights]
    x = {inner: torch.randn(rows, inner, generator=generator) for inner, _ in sizes}

    def all_by(product: Callable[..., object]) -> Callable[[], object]:
        return lambda: [product(x[len(weight)], weight) for weight in weights]

    compiled = CompiledProducts(HelperTeam())
    openmp = CompiledProducts(OpenMPTeam())
    packed = [compiled.pack(weight) for weight in weights]
    calls = {
        "compiled": lambda: [compiled.product(x[weight.shape[0]], weight) for weight in packed],
        "openmp": lambda: [openmp.product(x[weight.shape[0]], weight) for weight in packed],
        "mm": all_by(torch.mm),
        "linear": lambda: [torch.nn.functional.linear(x[weight.shape[1]], weight) for weight in turned],
    }
    is_alone = torch.get_num_threads() == 1
    clock, ways = (time.thread_time, ALONE) if is_alone else (time.perf_counter, WAYS)
    with torch.inference_mode():
        found = in_turn(rounds, {way: partial(median_seconds, calls[way], clock) for way in ways})
    return {way: statistics.median(seconds) for way, seconds in found.items()}


def main() -> int:
    options = parser(__doc__, quick="the small preset, 1 to 32 rows, one round", rounds=3)
    text = "CPU threads (default: all cores)"
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help=text)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[Row] = []
    claims: list[Row] = []
    ways, neighbours = (ALONE, (False,)) if arguments.threads == 1 else (WAYS, (False, True))
    for shape, busy in itertools.product(SHAPES, neighbours):
        layers, sizes = SHAPES[shape]
        elements = layers * sum(inner * columns for inner, columns in sizes)
        for count in (1, 8, 32) if arguments.quick else ROWS:
            if arguments.quick and shape != "small":
                continue
            with neighbour(busy=busy):
                seconds = measure(shape, count, 1 if arguments.quick else arguments.rounds)
            beside = "a busy process" if busy else "nothing"
            row = {"shape": shape, "rows": count, "beside": beside}
            row |= {f"{way}_ms": round(1e3 * seconds[way], 3) for way in ways}
            rows.append(row | {"gflops": round(2e-9 * count * elements / seconds["compiled"], 1)})
            peer = min(("mm", "linear"), key=seconds.__getitem__)
            for other in (peer, "openmp") if busy else (peer,):
                name = f"products of {count} rows beside {beside}, {shape}"
                claims.append(claim(name, seconds["compiled"] / seconds[other], "ratio", 1.0, peer=other))
    table(rows[0], [row.values() for row in rows])
    facts = {"threads": arguments.threads, "torch": torch.__version__}
    return report(claims, arguments.json, {**facts, "rows": rows})


if __name__ == "__main__":
    exit_with(main)

"""Held-out test of attention: how well a profile of this machine predicts contexts that it has not seen.

    python benchmarks/attention.py --quick
    python benchmarks/attention.py --json benchmarks/results/attention.json

Measures the steps of `medha profile` for the `small` preset (8 layers, hidden 512, 8/2 heads) twice, in CPU time of
one thread: chunks and decodes, alone and together, after contexts of up to 16,384 tokens. For each range of contexts,
a fit that has not seen it predicts its steps. The errors are compared with the machine's own noise, the difference
between the two measurements of a step. Run nothing else meanwhile.
"""

import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as `medha up` sets it for ranks; read when torch is loaded

import numpy as np
from harness import claim, exit_with, parser, progress, report, table

from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.profiling import step_timer as profile
from medha_worker.profiling.profile_fit import MeasuredStep, errors, fit_profile, held_out

MAX_STEP_SECONDS = 10.0
GOAL = 0.3  # the uncertainty of attention's rate (docs/predictor.md)


def measure(timer: profile.StepTimer, shapes: list[profile.Shape], rounds: int) -> list[MeasuredStep]:
    return profile.measure(timer, shapes, rounds=rounds, max_step_seconds=MAX_STEP_SECONDS)


def apart(first: list[MeasuredStep], second: list[MeasuredStep]) -> float:
    """Return the mean of |second / first - 1| over the steps that both have."""
    before = {step.works: step.seconds for step in first}
    return float(
        np.mean([abs(step.seconds / before[step.works] - 1) for step in second if step.works in before])
    )


def main() -> int:
    arguments = parser(__doc__, quick="contexts to 4,096 tokens, each step once").parse_args()
    longest, largest, decodes, rounds = (4096, 512, 16, 1) if arguments.quick else (16_384, 2048, 64, 3)

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "small"
        init_checkpoint(directory, preset="small", seed=0)
        model = profile.load(directory, max_model_len=longest + largest, dtype="float32", threads=1)
        grid = profile.grid(
            max_context=longest, max_chunk=largest, max_decodes=decodes, quick=arguments.quick
        )
        timer = profile.StepTimer(model, grid.pool_tokens, time.process_time)
        shapes = grid.shapes()
        progress(f"{len(shapes)} steps, measured {rounds} times; then in reverse order")
        steps, again = measure(timer, shapes, rounds), measure(timer, shapes[::-1], rounds)
        layers = model.config.num_layers

    noise = apart(steps, again)
    seen = errors(fit_profile(steps, layers=layers, name="small", source="benchmarks/attention.py"), steps)
    tests = held_out(steps, layers=layers)
    print(
        f"{len(steps)} steps; measured again they differ by {noise:.1%}; all seen: {seen.mean():.1%} mean error"
    )
    rows = [
        (f"{test.low}-{test.high}", test.steps, f"{test.mean_error:.1%}", f"{test.worst_error:.1%}")
        for test in tests
    ]
    table(("contexts held out", "steps", "mean", "worst"), rows)
    farthest = tests[-1]
    name = f"error of steps behind {farthest.low}-{farthest.high} tokens, the fit saw none of them"
    peer = f"the same steps measured twice differ by {noise:.1%}"
    claims = [
        claim(f"{of} {name}", value, "share", GOAL, peer=peer)
        for of, value in (("mean", farthest.mean_error), ("worst", farthest.worst_error))
    ]
    figures = {
        "steps_planned": len(shapes),
        "steps_measured": len(steps),
        "held_out": [asdict(test) for test in tests],
        "all_seen_mean_error": round(float(seen.mean()), 4),
        "measured_twice": round(noise, 4),
    }
    return report(claims, arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)

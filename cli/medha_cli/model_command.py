"""`medha model`: makes small checkpoints, so that everything can be tried without a download, and scales for FP8 KV."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from medha.errors import ConfigInvalid
from medha_cli.options import FILE, FOLDER, given

if TYPE_CHECKING:
    from medha_worker.checkpoints.measured_kv_scales import HeadReach


@click.group("model")
def command() -> None:
    """Make checkpoints, and measure scales for keys and values in FP8."""


@command.command("init")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--preset",
    default="tiny",
    show_default=True,
    help="tiny (random, 0.5 M parameters), small (random, 27 M), needle (finds passkeys) or needle-fp8 (also with KV in FP8).",
)
@click.option(
    "--architecture",
    default="llama",
    show_default=True,
    help="Family: llama, mistral, qwen2, qwen3, gemma3_text, or with experts: mixtral, qwen3_moe, deepseek_v2, deepseek_v3, "
    "gpt_oss.",
)
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    help="Data type of the weights: float32, bfloat16 or float16.",
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    default=None,
    help="Tokens of a sliding window: of all layers of a mistral, mixtral or qwen3_moe, of the upper half of a qwen2 or "
    "qwen3, of every second layer of a gemma3_text or gpt_oss, which has one of 512 or 128 tokens in any case.",
)
@click.option(
    "--quantisation",
    default="none",
    show_default=True,
    help="Format of the linears, those of experts included: none, w8a8, w4a16, w4a16-asym, fp8, fp8-tensor, fp8-block, fp8-block-ue8m0, fp8-kv, "
    "awq, gptq or gptq-desc-act; of a gpt_oss: mxfp4.",
)
@click.option(
    "--mtp-layers",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Layers of a deepseek_v3 that predict further tokens; the others are the same with and without them.",
)
@click.option(
    "--eagle3-of",
    "target",
    type=click.Path(path_type=Path),
    default=None,
    help="Make a random EAGLE-3 head for the checkpoint in this directory instead; of the other options, only --seed and "
    "--force apply.",
)
@click.option(
    "--seed", default=0, show_default=True, help="Seed; equal arguments and seeds give equal bytes."
)
@click.option("--force", is_flag=True, help="Replace an earlier checkpoint of this kind.")
@click.pass_context
def init(
    context: click.Context,
    directory: Path,
    preset: str,
    architecture: str,
    dtype: str,
    window: int | None,
    quantisation: str,
    mtp_layers: int,
    target: Path | None,
    seed: int,
    force: bool,
) -> None:
    """Make a small checkpoint in DIRECTORY, in the form of a Hugging Face model.

    It has a byte-level BPE tokenizer and a chat template. The output of tiny and small is meaningless. needle
    answers "The passkey of Oslo ->" with the passkey that a long text before it gives for Oslo (docs/needle.md).

    \b
    Examples:
      medha model init .medha/tiny
      medha model init .medha/needle --preset needle
      medha model init /tmp/small --preset small --seed 7 --architecture qwen3 --dtype bfloat16
      medha model init /tmp/experts --architecture mixtral
      medha model init /tmp/window --architecture mistral --window 1024
      medha model init /tmp/w4a16 --quantisation w4a16
      medha model init /tmp/deepseek --architecture deepseek_v3 --quantisation fp8-block
      medha model init /tmp/mtp --architecture deepseek_v3 --mtp-layers 1
      medha model init /tmp/gpt-oss --architecture gpt_oss --quantisation mxfp4
      medha model init /tmp/eagle3 --eagle3-of .medha/tiny
    """
    if target is not None:
        _init_eagle3(context, directory, target, seed, force)
        return
    from medha_worker.checkpoints.presets import init_checkpoint  # imports torch, which takes seconds

    init_checkpoint(
        directory,
        preset=preset,
        seed=seed,
        architecture=architecture,
        dtype=dtype,
        window_tokens=window,
        quantisation=quantisation,
        mtp_layers=mtp_layers,
        force=force,
    )
    sliding = "" if window is None else f", window of {window} tokens"
    quantised = "" if quantisation == "none" else f", quantised as {quantisation}"
    further = "" if mtp_layers == 0 else f", MTP layers {mtp_layers}"
    click.echo(
        f"{directory}: a {preset} {architecture} checkpoint in {dtype}{quantised}, seed {seed}{sliding}{further}"
    )


def _init_eagle3(context: click.Context, directory: Path, target: Path, seed: int, force: bool) -> None:
    """Make an EAGLE-3 head, whose form follows from that of its target."""
    for option in ("preset", "architecture", "dtype", "window", "quantisation", "mtp_layers"):
        if context.get_parameter_source(option) is not click.core.ParameterSource.DEFAULT:
            name = option.replace("_", "-")
            raise ConfigInvalid(
                f"--{name} does not apply to the EAGLE-3 head that --eagle3-of asks for; leave one of them out"
            )
    from medha_worker.checkpoints.eagle3_preset import init_eagle3  # imports torch, which takes seconds

    init_eagle3(directory, target, seed=seed, force=force)
    click.echo(f"{directory}: an EAGLE-3 head for {target}, seed {seed}")


@command.command("kv-scales")
@click.argument("directory", type=FOLDER)
@click.option(
    "--text",
    type=FILE,
    help="Text in UTF-8, such as those that you will serve. Default: random tokens, each equally likely.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Most tokens that are measured. They pass the model in sequences of up to 2048.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random tokens."
)
@click.option(
    "--check",
    is_flag=True,
    help="Write nothing; show what the tokens need of the scales that the checkpoint is served with.",
)
@click.option("--force", is_flag=True, help="Replace scales that were measured before.")
@click.pass_context
def kv_scales(
    context: click.Context,
    directory: Path,
    text: Path | None,
    tokens: int,
    seed: int,
    check: bool,
    force: bool,
) -> None:
    """Measure scales of keys and values in FP8 for the checkpoint in DIRECTORY, and write them into it.

    Ranks use the file, kv_scales.safetensors, if spec.kvCache.dtype is fp8 (docs/quantisation.md). The command runs the model on
    the CPU, and holds one layer at a time. Measure once, and copy the file wherever the checkpoint is: replicas share
    KV only if their scales are the same. Measure again if the weights change.

    With --check the exit status is 1 if a number is too large for its scale.

    \b
    Examples:
      medha model kv-scales .medha/needle
      medha model kv-scales models/llama --text reports.txt --tokens 32768
      medha model kv-scales models/llama --text others.txt --check
    """
    if check and force:
        raise ConfigInvalid("--check writes nothing, so that --force does not apply; leave one of both out")
    if text is not None and given(context, "seed"):
        raise ConfigInvalid(
            "--seed is that of random tokens, so that it does not apply to --text; leave one of both out"
        )
    from medha_worker.checkpoints import measured_kv_scales as measuring  # imports torch, which takes seconds

    if not check:
        measuring.require_measurable(directory, force=force)
    sequences = (
        measuring.random_sequences(directory, tokens, seed)
        if text is None
        else measuring.sequences_of_text(directory, text, tokens)
    )
    count = sum(map(len, sequences))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"passing {count} tokens through layers", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if check:
            reaches = measuring.reach_of(directory, sequences, progress)
        else:
            target = measuring.write_scales(
                directory, measuring.measure_scales(directory, sequences, progress)
            )
    source = f"random tokens, seed {seed}" if text is None else str(text)
    if not check:
        click.echo(
            f"{target}: scales by {count} tokens ({source}); numbers up to twice the largest of theirs fit"
        )
        return
    click.echo(f"{directory}, {count} tokens ({source}):")
    sys.exit(_show_reach(reaches))


def _show_reach(reaches: Sequence[HeadReach]) -> int:
    """Print what tokens need of scales; return 1 if a number is too large for its scale, else 0."""
    for kind in ("keys", "values"):
        most = max((one for one in reaches if one.kind == kind), key=lambda one: one.share)
        click.echo(
            f"{kind} need up to {most.share:.3g} of what a scale holds (layer {most.layer}, KV head {most.head})"
        )
    too_large = sum(one.share > 1 for one in reaches)
    click.echo(
        f"{too_large} of {len(reaches)} scales are too small; larger numbers become the largest that a scale holds"
    )
    return int(too_large > 0)

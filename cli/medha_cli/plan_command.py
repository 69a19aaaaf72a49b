"""`medha plan`: finds the grids of GPUs that serve a model at a context length, and their cost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from medha.cost.hardware import HARDWARE, MODELS, Hardware, ModelShape
from medha.errors import ConfigInvalid
from medha.model.kv_dtype import KvDtype, kv_element_bytes
from medha_cli.byte_option import Bytes
from medha_cli.model_shapes import model_shape
from medha_cli.options import FILE, Number, given
from medha_cli.result_files import require_writable, write_page
from medha_cli.simulate_command import require_plotly
from medha_sim.head_shape import HeadShape, mtp_shape, read_eagle3_shape
from medha_sim.plan import MOST_GPUS, Bounds, Rating, Wish, bounds, plan, shortfall

_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "ki": 1 << 10, "mi": 1 << 20}
_MOST_TOKENS = 10**9
_MOST_REQUESTS = 10**6
_IN_TIERS = "A prompt that takes longer to come is computed."
_WIDEST = 1000  # columns of a terminal


class Tokens(click.ParamType[int]):
    """A number of tokens: 131072, 128K (thousands), 1M, or with binary units 128Ki, 1Mi."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(|[km]i?)", value.strip().lower().replace(",", ""))
        if match is None:
            self.fail(f"{value!r} is no number of tokens; write 131072, 128K, 1M, 128Ki or 1Mi", param, ctx)
        tokens = float(match[1]) * _UNITS[match[2]]
        if not 1 <= tokens <= _MOST_TOKENS:
            self.fail(f"{value!r} is not in the range of 1 to {_MOST_TOKENS:,} tokens", param, ctx)
        return int(tokens)


@click.command("plan")
@click.option(
    "--model",
    "model_name",
    default="Llama-3-8B",
    show_default=True,
    help=f"A preset ({', '.join(MODELS)}), a config.json, or the folder of a checkpoint.",
)
@click.option(
    "--draft-model",
    "draft_name",
    help="A draft model, as --model: its weights and KV take memory of the GPU that samples on each lane. Times do not "
    "count it.",
)
@click.option(
    "--prediction-head",
    "head_name",
    help="`mtp`, or the folder of an EAGLE-3 head or its config.json: its weights and KV take memory of the GPU that "
    "samples on each lane. Times do not count it.",
)
@click.option(
    "--hardware", "hardware_name", default="H100", show_default=True, help=f"One of {', '.join(HARDWARE)}."
)
@click.option(
    "--context", type=Tokens(), default="1M", show_default=True, help="Prompt length: 128K, 1M, 2Mi."
)
@click.option("--output", type=Tokens(), default="512", show_default=True, help="Output tokens of a request.")
@click.option(
    "--ttft", type=Number(0, min_open=True), default=30.0, show_default=True,
    help="Target of the seconds to the first token of a lone prompt.",
)  # fmt: skip
@click.option(
    "--tpot", type=Number(0, min_open=True), default=0.05, show_default=True,
    help="Target of the seconds per output token, beside a prefill.",
)  # fmt: skip
@click.option(
    "--concurrent", type=click.IntRange(1, _MOST_REQUESTS), default=1, show_default=True,
    help="Requests of this length whose KV must fit at a time.",
)  # fmt: skip
@click.option(
    "--max-gpus", type=click.IntRange(1, MOST_GPUS), default=128, show_default=True,
    help="Most GPUs of a grid that is considered.",
)  # fmt: skip
@click.option(
    "--price", type=Number(0, min_open=True), default=2.5, show_default=True,
    help="Price of one GPU for one hour, in your currency.",
)  # fmt: skip
@click.option(
    "--kv-dtype", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True,
    help="Data type of keys and values, as spec.kvCache.dtype.",
)  # fmt: skip
@click.option(
    "--host-tier", "host_bytes", type=Bytes(),
    help="Host memory of each GPU for evicted KV, as spec.kvCache.tiers.host.size, e.g. 64Gi.",
)  # fmt: skip
@click.option(
    "--disk-tier", "disk_bytes", type=Bytes(),
    help="Bytes of files of each GPU behind the host tier, as spec.kvCache.tiers.disk.size, e.g. 500Gi.",
)  # fmt: skip
@click.option(
    "--disk-bandwidth", "disk_bytes_per_second", type=Bytes(), default="1Gi", show_default=True,
    help="Bytes per second that each GPU reads from its disk tier: a disk is shared by all GPUs of a node.",
)  # fmt: skip
@click.option(
    "--store", "store_bytes_per_second", type=Bytes(),
    help="Bytes per second that each GPU reads of a store that replicas share, as spec.kvCache.tiers.store.bandwidth.",
)  # fmt: skip
@click.option(
    "--streaming", "streaming_bytes", type=Bytes(),
    help="Host memory of each GPU for a request larger than the KV pools, as spec.kvCache.streaming.size, e.g. 64Gi.",
)  # fmt: skip
@click.option(
    "--memory-fraction", type=Number(0, 1, min_open=True), default=0.9, show_default=True,
    help="Share of a GPU's memory that may be used.",
)  # fmt: skip
@click.option(
    "--no-prefix-caching", "prefix_caching", is_flag=True, flag_value=False, default=True,
    help="Plan for kvCache.prefixCaching false: layers with sliding windows then keep none of cached prefixes.",
)  # fmt: skip
@click.option(
    "--rows", type=click.IntRange(1), default=8, show_default=True, help="Number of grids that are listed."
)
@click.option("--plot", type=FILE, help="File for an HTML page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for other programs.")
@click.pass_context
def command(
    click_context: click.Context,
    model_name: str,
    draft_name: str | None,
    head_name: str | None,
    hardware_name: str,
    context: int,
    output: int,
    ttft: float,
    tpot: float,
    concurrent: int,
    max_gpus: int,
    price: float,
    kv_dtype: KvDtype,
    host_bytes: int | None,
    disk_bytes: int | None,
    disk_bytes_per_second: int,
    store_bytes_per_second: int | None,
    streaming_bytes: int | None,
    memory_fraction: float,
    prefix_caching: bool,
    rows: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Find the TP x SPP x KVP grids that meet a TTFT and a TPOT target, and their cost.

    TTFT is that of a lone prompt whose chunks leave room for the TPOT of decodes beside it. Times come from the
    predictor that the scheduler uses, a roofline with fitted efficiencies; they are no measurement of your machines. If no
    grid meets both targets, the closest are shown, and the exit status is 2.

    \b
    Examples:
      medha plan --model Llama-3-8B --context 1M --ttft 30 --tpot 0.02
      medha plan --model Llama-3-70B --hardware H200 --context 2M --ttft 60 --max-gpus 256 --plot plan.html
      medha plan --context 128K --host-tier 64Gi --disk-tier 500Gi --store 256Mi
      medha plan --model .medha/tiny --context 4K --json
    """
    if given(click_context, "disk_bytes_per_second") and not disk_bytes:
        raise ConfigInvalid(
            f"--disk-bandwidth is {disk_bytes_per_second}, and there is no disk tier; give its size (--disk-tier), or leave it out"
        )
    for option, value in (("--disk-tier", disk_bytes), ("--store", store_bytes_per_second)):
        if value and not host_bytes:
            raise ConfigInvalid(
                f"{option} is {value:,}, and there is no host tier, through which all KV of disks and stores passes; give its "
                f"size, too (--host-tier 64Gi), or leave {option} out"
            )
    if host_bytes and not prefix_caching:
        raise ConfigInvalid(
            f"--host-tier is {host_bytes:,}, and it keeps cached prefixes, of which --no-prefix-caching leaves none; leave one "
            "of them out"
        )
    model = model_shape("--model", model_name)
    if kv_dtype != "auto":
        model = replace(model, kv_dtype_bytes=kv_element_bytes(kv_dtype, model.dtype_bytes))
    hardware = _hardware(hardware_name)
    wish = Wish(
        context_tokens=context,
        output_tokens=output,
        ttft_seconds=ttft,
        tpot_seconds=tpot,
        concurrent=concurrent,
        gpu_hour_price=price,
        memory_fraction=memory_fraction,
        max_gpus=max_gpus,
        draft=_drafter(model, draft_name, head_name),
        prefix_caching=prefix_caching,
        host_bytes=host_bytes or 0,
        disk_bytes=disk_bytes or 0,
        disk_bytes_per_second=disk_bytes_per_second,
        store_bytes_per_second=store_bytes_per_second or 0.0,
        streaming_bytes=streaming_bytes or 0,
    )
    if plot is not None:
        require_plotly()
        require_writable("--plot", plot, inputs=[Path(model_name)])
    ratings = plan(model, hardware, wish)
    over_context = bounds(model, hardware, wish, _contexts(context))
    console = Console(highlight=False)
    if as_json:
        click.echo(json.dumps(_as_json(model, hardware, wish, ratings, over_context), indent=1))
    else:
        for table in (_grids_table(model, hardware, wish, ratings[:rows]), _bounds_table(wish, over_context)):
            _print_whole(console, table)
    if plot is not None:
        from medha_sim.plan_page import page  # imports the plotting library

        title = f"{model.name} on {hardware.name}: TTFT {ttft:g} s, TPOT {1e3 * tpot:g} ms"
        write_page("--plot", plot, page(title, wish, ratings, over_context), "what it would show is printed")
        if not as_json:
            console.print(f"plots: {plot}", markup=False)
    if not ratings[0].fits:
        raise ConfigInvalid(shortfall(model, hardware, wish, ratings[0]))


def _drafter(
    model: ModelShape, draft_name: str | None, head_name: str | None
) -> ModelShape | HeadShape | None:
    if draft_name is not None and head_name is not None:
        raise ConfigInvalid("--draft-model and --prediction-head exclude each other; leave one of them out")
    if draft_name is not None:
        return model_shape("--draft-model", draft_name)
    if head_name is None:
        return None
    return mtp_shape(model) if head_name == "mtp" else read_eagle3_shape(Path(head_name), model)


def _hardware(name: str) -> Hardware:
    for hardware in HARDWARE.values():
        if name.lower() in (hardware.name.lower(), hardware.name.split("-")[0].lower()):
            return hardware
    raise ConfigInvalid(f"--hardware {name}: it is not described; choose one of {', '.join(HARDWARE)}")


def _contexts(context: int) -> list[int]:
    """Return context lengths around the requested one."""
    return [max(1, int(context * factor)) for factor in (0.125, 0.25, 0.5, 1, 2, 4, 10)]


def _grids_table(model: ModelShape, hardware: Hardware, wish: Wish, ratings: Sequence[Rating]) -> Table:
    offloads = any(rating.offload_bytes for rating in ratings)
    table = Table(
        title=(
            f"{model.name} on {hardware.name}: {wish.context_tokens:,} + {wish.output_tokens:,} tokens, "
            f"TTFT {wish.ttft_seconds:g} s, TPOT {1e3 * wish.tpot_seconds:g} ms"
        ),
        caption=_caption(model, hardware, wish, ratings),
        caption_justify="left",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("TP x SPP\nx KVP", no_wrap=True)
    for heading in (
        "GPUs",
        "TTFT\ns",
        "TPOT\nms",
        "Batch",
        "Wgts\nGB",
        "KV GB\nof",
        "Holds\ntokens",
        "In\n/M",
        "Out\n/M",
        *(["Host\ntokens", "Host\ns"] if wish.host_bytes else []),
        *(["Disk\ntokens", "Disk\ns"] if wish.disk_bytes else []),
        *(["Store\ns"] if wish.store_bytes_per_second else []),
        *(["Longest\ntokens", "at\ns"] if wish.streaming_bytes else []),
        *(["Offl.\nGB"] if offloads else []),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, rating in enumerate(ratings):
        style = "dim" if not rating.fits else "bold green" if index == 0 else ""
        table.add_row(*_cells(wish, rating, offloads=offloads), style=style)
    return table


def _caption(model: ModelShape, hardware: Hardware, wish: Wish, ratings: Sequence[Rating]) -> str:
    in_windows = ""
    if model.window_share:
        share = model.window_bytes_per_token
        in_windows = f", {share:,} of them in layers with a window of {model.window_tokens:,} tokens"
    sentences = [
        f"A token takes {model.kv_bytes_per_token:,} bytes of KV{in_windows}.",
        f"GB are of one GPU. Cost per million tokens at {wish.gpu_hour_price:g} an hour and GPU; prompts one after "
        "the other, decodes in the largest batch.",
    ]
    if wish.draft is not None:
        sentences.append(f"Weights and KV of the GPU that samples hold those of {wish.draft.name}, too.")
    if wish.host_bytes:
        sentences.append(
            f"Host: tokens of evicted KV in the host tiers, of {wish.host_bytes / 1e9:.3g} GB of host memory for each GPU "
            f"(at most {hardware.devices_per_node * wish.host_bytes / 1e9:,.0f} GB a node)."
        )
        tiers = "Host s" + (", disk s" if wish.disk_bytes else "")
        tiers += ", store s" if wish.store_bytes_per_second else ""
        sentences.append(
            f"{tiers}: until the KV of the whole prompt has come from there, instead of being computed within TTFT. {_IN_TIERS}"
        )
        if wish.disk_bytes:
            sentences.append(
                f"Disk: tokens in files of {wish.disk_bytes / 1e9:,.0f} GB for each GPU, which reads "
                f"{wish.disk_bytes_per_second / 1e9:.3g} GB/s."
            )
        if wish.store_bytes_per_second:
            sentences.append(
                f"The store gives each GPU {wish.store_bytes_per_second / 1e9:.3g} GB/s, and is as large as you let it be."
            )
    if wish.streaming_bytes:
        sentences.append(
            f"Longest: tokens of a request that streams {wish.streaming_bytes / 1e9:.3g} GB of host memory to each GPU; each of "
            "its steps takes at least so many seconds (`at s`). A grid whose pools do not hold the wished request has its TTFT "
            "and TPOT with streaming; its KV is in neither the prefix cache nor a tier."
        )
    if not all(rating.fits for rating in ratings):
        sentences.append("A figure with ! misses its target.")
    if any(rating.offload_bytes for rating in ratings):
        sentences.append("Offl.: what does not fit, of all GPUs together.")
    return " ".join(sentences)


def _cells(wish: Wish, rating: Rating, *, offloads: bool) -> list[str]:
    missed = {name: "!" if name in rating.misses else "" for name in ("TTFT", "TPOT", "memory")}
    cells = [
        " x ".join(str(size) for size in astuple(rating.topology)),
        str(rating.gpus),
        _figure(rating.ttft_seconds) + missed["TTFT"],
        _figure(1e3 * rating.tpot_seconds) + missed["TPOT"],
        str(rating.batch),
        _figure(rating.weights_bytes / 1e9),
        f"{_figure(rating.kv_bytes / 1e9)}/{rating.kv_room_bytes / 1e9:.0f}{missed['memory']}",
        _short(rating.kv_tokens),
        _figure(rating.cost_per_million_input, digits=2),
        _figure(rating.cost_per_million_output) if rating.batch else "-",
    ]
    if wish.host_bytes:
        cells += [_short(rating.host_tokens), _seconds(rating.host_seconds)]
    if wish.disk_bytes:
        cells += [_short(rating.disk_tokens), _seconds(rating.disk_seconds)]
    if wish.store_bytes_per_second:
        cells.append(_seconds(rating.store_seconds))
    if wish.streaming_bytes:
        cells += [_short(rating.longest_tokens), _figure(rating.longest_step_seconds)]
    if offloads:
        cells.append(f"{rating.offload_bytes / 1e9:,.0f}")
    return cells


def _print_whole(console: Console, table: Table) -> None:
    """Print a table with all of its columns, however narrow the terminal is: rich would shorten figures."""
    unbounded = console.options.update(max_width=_WIDEST)
    whole = Measurement.get(console, unbounded, table).maximum
    Console(highlight=False, width=max(console.width, whole)).print(table)


def _figure(value: float, *, digits: int = 1) -> str:
    return f"{value:.{digits}f}" if value < 100 else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else _figure(value, digits=2)


def _short(tokens: int) -> str:
    if tokens < 1000:
        return str(tokens)
    return f"{tokens / 1e6:.1f}M" if tokens >= 1e6 else f"{tokens / 1e3:.0f}K"


def _bounds_table(wish: Wish, rows: Sequence[Bounds]) -> Table:
    table = Table(
        title="GPUs by context, same targets",
        caption="Compute, memory, bandwidth: what each asks for at the data sheet's peak. Plan: the smallest grid found.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in ("Context", "Compute", "Memory", "Bandwidth", "Bound by", "Plan"):
        table.add_column(name, justify="left" if name == "Bound by" else "right")
    for row in rows:
        table.add_row(
            f"{row.context_tokens:,}",
            str(row.compute),
            str(row.memory),
            str(row.bandwidth),
            row.binding,
            f"> {wish.max_gpus}" if row.planned is None else str(row.planned),
            style="bold" if row.context_tokens == wish.context_tokens else "",
        )
    return table


def _as_json(
    model: ModelShape, hardware: Hardware, wish: Wish, ratings: Sequence[Rating], rows: Sequence[Bounds]
) -> dict[str, Any]:
    return {
        "model": asdict(model),
        "hardware": asdict(hardware),
        "wish": asdict(wish),
        "plan": str(ratings[0].topology) if ratings[0].fits else None,
        "grids": [{**asdict(rating), "gpus": rating.gpus, "fits": rating.fits} for rating in ratings],
        "by_context": [{**asdict(row), "bound_by": row.binding} for row in rows],
    }

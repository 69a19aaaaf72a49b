"""The page of `medha plan`: GPUs over context length, and TTFT against TPOT of every grid, in one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as graph
from plotly.io import to_html
from plotly.subplots import make_subplots

from medha_sim.plan import Bounds, Rating, Wish
from medha_sim.study_plots import LOG

_HEIGHT = 620

_COLOURS = {"compute": "#d62728", "memory": "#1f77b4", "bandwidth": "#2ca02c", "plan": "#111111"}


def page(title: str, wish: Wish, ratings: Sequence[Rating], rows: Sequence[Bounds]) -> str:
    """Return a self-contained page; reading it needs no network."""
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("GPUs that each resource asks for", "Every grid, and the targets")
    )
    contexts = [row.context_tokens for row in rows]
    for name in ("compute", "memory", "bandwidth"):
        line = graph.Scatter(
            x=contexts,
            y=[getattr(row, name) for row in rows],
            name=f"{name} alone",
            line={"color": _COLOURS[name], "dash": "dot"},
        )
        figure.add_trace(line, row=1, col=1)
    planned = [row for row in rows if row.planned is not None]
    figure.add_trace(
        graph.Scatter(
            x=[row.context_tokens for row in planned],
            y=[row.planned for row in planned],
            name="smallest grid that meets both targets",
            mode="lines+markers",
            line={"color": _COLOURS["plan"]},
        ),
        row=1,
        col=1,
    )
    for fits, colour, name in ((True, "#2ca02c", "meets the targets"), (False, "#bbbbbb", "misses one")):
        shown = [rating for rating in ratings if rating.fits is fits]
        figure.add_trace(
            graph.Scatter(
                x=[1e3 * rating.tpot_seconds for rating in shown],
                y=[rating.ttft_seconds for rating in shown],
                text=[f"{rating.topology}, {rating.gpus} GPUs" for rating in shown],
                hovertemplate="%{text}<br>TPOT %{x:.1f} ms, TTFT %{y:.1f} s<extra></extra>",
                name=name,
                mode="markers",
                marker={"color": colour, "size": 9},
            ),
            row=1,
            col=2,
        )
    figure.add_vline(x=1e3 * wish.tpot_seconds, line_dash="dash", row=1, col=2)
    figure.add_hline(y=wish.ttft_seconds, line_dash="dash", row=1, col=2)
    figure.update_xaxes(title_text="context, tokens", **LOG, row=1, col=1)
    figure.update_yaxes(title_text="GPUs", **LOG, row=1, col=1)
    figure.update_xaxes(title_text="TPOT, ms", **LOG, row=1, col=2)
    figure.update_yaxes(title_text="TTFT, s", **LOG, row=1, col=2)
    figure.update_layout(
        template="plotly_white", height=_HEIGHT, margin={"t": 60}, legend={"orientation": "h", "y": -0.2}
    )
    plot = to_html(
        figure,
        include_plotlyjs=True,
        full_html=False,
        div_id="plan",
        config={"displaylogo": False, "responsive": True},
    )
    return "\n".join(
        (
            "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
            f"<meta name='viewport' content='width=device-width'><title>{escape(title)}</title>",
            "<style>body { font-family: sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }</style>",
            f"</head><body><h1>{escape(title)}</h1>{plot}</body></html>",
        )
    )

"""Pictures of dashboards: what is asked, and what is drawn of the answers."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from dashboard_plot import plot

SPAN = plot.Span(1000.0, 1060.0, 5.0, 20.0)
SVG = "{http://www.w3.org/2000/svg}"


def answering(value: float, *gaps: int) -> Any:
    """Every query gives one series of this value, without the samples of these numbers."""

    def ask(query: str, span: Any) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        times = [span.start + number * span.step_seconds for number in range(13) if number not in gaps]
        return [({"model": "m & n"}, [(at, value) for at in times])]

    return ask


def drawn(name: str, ask: Any, absent: dict[str, str] | None = None) -> ET.Element:
    document = plot.documents()[name]
    picture = plot.drawing(document, plot.answers(document, ask, SPAN), absent or {}, SPAN)
    return ET.fromstring(picture)  # noqa: S314 (we have just made it)


def texts(picture: ET.Element) -> list[str]:
    return ["".join(text for text in one.itertext()) for one in picture.iter(f"{SVG}text")]


def test_a_query_has_a_value_for_each_of_grafanas_variables() -> None:
    query = 'rate(x{namespace=~"$namespace"}[$__rate_interval]) / rate(y[$__range])'
    assert plot.chosen(query, SPAN) == 'rate(x{namespace=~".*"}[20s]) / rate(y[60s])'


@pytest.mark.parametrize("name", plot.documents())
def test_a_picture_shows_each_panel_and_says_that_it_is_not_grafana(name: str) -> None:
    picture = drawn(name, answering(0.5))
    shown = texts(picture)
    panels = plot.panels_of(plot.documents()[name])
    assert sum(any(text.startswith(panel["title"]) for text in shown) for panel in panels) == len(panels)
    assert any("This is not Grafana." in text for text in shown)
    lines = sum(len(panel["targets"]) for panel in panels if panel["type"] != "stat")
    assert len(list(picture.iter(f"{SVG}polyline"))) == lines
    assert not any("No data" in text for text in shown)


def test_a_panel_without_data_says_why() -> None:
    shown = texts(drawn("slo", lambda *_: [], {"Messages dropped": "all is well"}))
    assert "No data: all is well" in shown
    assert "No data: no data" in shown


def test_what_is_no_number_is_no_data_and_a_gap_stays_a_gap() -> None:
    assert "No data: no data" in texts(drawn("operator", answering(math.nan)))
    whole, parted = (
        len(list(drawn("operator", answering(1.0, *gaps)).iter(f"{SVG}polyline"))) for gaps in ((), (5, 6))
    )
    assert parted == 2 * whole


@pytest.mark.parametrize(("value", "colour"), [(0.5, "#c4162a"), (0.92, "#e0752d"), (0.99, "#37872d")])
def test_a_share_of_requests_has_the_colour_of_its_threshold(value: float, colour: str) -> None:
    large = [one for one in drawn("slo", answering(value)).iter(f"{SVG}text") if one.get("font-size") == "36"]
    assert {one.get("fill") for one in large} == {colour}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0125, "s", "12.5 ms"),
        (12.0, "s", "12 s"),
        (-13.88, "percentunit", "-1,388 %"),
        (0.125, "percentunit", "12.5 %"),
        (2_500_000.0, "short", "2.5 M"),
    ],
)
def test_a_value_has_its_unit(value: float, unit: str, text: str) -> None:
    assert plot.written(value, unit) == text

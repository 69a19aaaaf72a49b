"""Names and labels in PromQL, compared with the metric catalogue."""

from __future__ import annotations

import re

from medha.observing.metric_catalogue import CATALOGUE, Metric

_NAME = re.compile(r"\b(?:medha_\w+|vllm:\w+)")
_SELECTOR = re.compile(r"\b((?:medha_|vllm:)\w+)\{([^}]*)\}")
_GROUPED = re.compile(r"by \(([^)]*)\)")
_ADDED = {"namespace", "pod", "le"}
"""Labels that a scrape and a histogram add."""


def series() -> dict[str, Metric]:
    """Name of every series that is exposed -> its metric."""
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {metric.name + ending: metric for metric in CATALOGUE for ending in endings[metric.kind]}


def problems(query: str) -> list[str]:
    """What a query names that is not exposed: series, labels that it selects by, labels that it groups by."""
    known = series()
    names = [name for name in _NAME.findall(_without_recorded(query)) if name not in known]
    if names:
        return [f"no such series: {name}" for name in names]
    found = [
        f"{name} has no label {label}"
        for name, matchers in _SELECTOR.findall(query)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
        if label not in {*known[name].labels, *_ADDED}
    ]
    used = [known[name] for name in _NAME.findall(_without_recorded(query))]
    groups = [label.strip() for group in _GROUPED.findall(query) for label in group.split(",")]
    carried = _ADDED.union(*(metric.labels for metric in used))
    return found + [
        f"nothing in it has a label {label}" for label in groups if label and used and label not in carried
    ]


def _without_recorded(query: str) -> str:
    """The query without names of recording rules, which hold a metric's name between colons."""
    return re.sub(r"\b\w+:medha_\w+:\w+", "recorded", query)

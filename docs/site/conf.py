"""Sphinx's settings of the site; docs/site/build.py runs it."""

import tomllib
from pathlib import Path

_PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]

project = "Medha"
release = version = _PROJECT["version"]
extensions = ["myst_parser"]
root_doc = "docs/README"
myst_heading_anchors = 6  # named as GitHub names them, since pages are read there, too
nitpicky = True

html_theme = (
    "furo"  # has no fonts, scripts or styles of other hosts, and follows the reader's choice of light or dark
)
html_title = f"Medha {release}"
html_static_path = [str(Path(__file__).with_name("static"))]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_use_index = False
html_show_search_summary = (
    False  # a summary is fetched, which browsers forbid to pages that are opened as files
)
html_theme_options = {"footer_icons": [], "navigation_with_keys": True}

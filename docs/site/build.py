"""Build docs/ into a site that needs no other host: `python docs/site/build.py FOLDER` (`make site`).

Pages are the Markdown files that docs/README.md leads to, in its order. They keep their places, and so do the files
that they link to: those are copied along. A link to a folder leads to a page that lists its files. A link or a heading
that is missing is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START = "docs/README.md"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_NAMED = re.compile(r"\[[\w./-]+\.md\]\(([\w./-]+\.md(?:#[\w-]+)?)\)")
_FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_REDIRECT = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=docs/README.html">'
)


def links(text: str) -> Iterator[str]:
    """Yield the paths that a page links to, in its order, without those in blocks of code."""
    yield from (found[1] for found in _LINK.finditer(_FENCE.sub("", text)))


def reached(root: Path) -> dict[str, Path]:
    """Return name -> path of everything that START leads to, itself included, in the order in which it is found.

    Pages come with what they link to; names are relative to the root. A path may be a folder.
    """
    found = {START: root / START}
    waiting = [START]
    while waiting:
        page = waiting.pop(0)
        if not page.endswith(".md"):
            continue
        for target in links((root / page).read_text(encoding="utf-8")):
            name = os.path.normpath(Path(page).parent / target)
            if name in found or name.startswith("..") or not (root / name).exists():
                continue  # a link that leads nowhere stays as it is, and Sphinx reports it
            found[name] = root / name
            inside = _pages_in(root / name) if (root / name).is_dir() else []
            for file in inside:
                found.setdefault(file.relative_to(root).as_posix(), file)
            waiting += [name, *(file.relative_to(root).as_posix() for file in inside)]
    return found


def _pages_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.md"))


def for_site(page: str, text: str, folders: Iterable[str]) -> str:
    """Return a page's text as the site shows it.

    Links to folders lead to the pages that list them. A link whose text is the name of a page has that page's title instead.
    """
    known = set(folders)
    text = _NAMED.sub(r"[](\1)", text)

    def lead(match: re.Match[str]) -> str:
        is_folder = os.path.normpath(Path(page).parent / match[1]) in known
        return f"{match[1].rstrip('/')}/index.md" if is_folder else match[0]

    return _LINK.sub(lead, text)


def folder_page(name: str, folder: Path) -> str:
    """Return the page that lists a folder's files."""
    title = f"# {name[0].upper()}{name[1:]}\n\n"
    if pages := _pages_in(folder):
        listed = "\n".join(page.stem for page in pages)
        return f"{title}```{{toctree}}\n{listed}\n```\n"
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    return title + "".join(f"- [{file.name}]({file.name})\n" for file in files)


def chapters(start: str) -> list[tuple[str, list[str]]]:
    """Return heading and linked pages of each section of the start page; a page belongs to the first that names it."""
    seen: set[str] = set()
    found = []
    for section in re.split(r"^## ", start, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        named = [os.path.normpath(Path(START).parent / link) for link in links(text)]
        pages = [
            page
            for page in dict.fromkeys(named)
            if page not in seen and not Path(page).name.startswith("index")
        ]
        seen.update(pages)
        found.append((heading.strip(), pages))
    return found


def navigation(start: str, folders: Iterable[str], others: Iterable[str]) -> str:
    """Return the hidden tables of contents that order the site: the chapters of the start page, then other pages."""
    known = set(folders)
    lists = chapters(start)
    named = {page for _, pages in lists for page in pages}
    lists.append(("Other pages", [page for page in others if page not in named]))
    text = ""
    for heading, pages in lists:
        entries = [f"/{page}/index" if page in known else f"/{page.removesuffix('.md')}" for page in pages]
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n" + "\n".join(entries) + "\n```\n"
    return text


def write_sources(root: Path, sources: Path) -> None:
    """Write to `sources` what Sphinx reads."""
    found = reached(root)
    folders = [name for name, path in found.items() if path.is_dir()]
    pages = [name for name in found if name.endswith(".md")]
    for name, path in found.items():
        target = sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            target.mkdir(exist_ok=True)
            for file in path.iterdir():
                if file.is_file() and file.suffix != ".md":
                    shutil.copy(file, target)
            page = folder_page(name.removeprefix("docs/"), path)
            (target / "index.md").write_text(page, encoding="utf-8")
        elif name in pages:
            text = for_site(name, path.read_text(encoding="utf-8"), folders)
            target.write_text(text, encoding="utf-8")
        else:
            shutil.copy(path, target)
    in_folders = {Path(page).parent.as_posix() for page in pages} & set(folders)
    others = [*pages, *(name for name in folders if name not in in_folders)]
    alone = [name for name in others if name != START and Path(name).parent.as_posix() not in in_folders]
    start = sources / START
    text = (root / START).read_text(encoding="utf-8")
    start.write_text(start.read_text(encoding="utf-8") + navigation(text, folders, alone), encoding="utf-8")


def build(root: Path, out: Path, *, jobs: int = 1) -> int:
    """Build the site in `out`, and return Sphinx's exit status."""
    with tempfile.TemporaryDirectory(prefix="medha-docs-") as folder:
        sources, doctrees = Path(folder, "sources"), Path(folder, "doctrees")
        write_sources(root, sources)
        command = [
            sys.executable,
            "-m",
            "sphinx",
            "--builder",
            "html",
            "--conf-dir",
            str(Path(__file__).parent),
        ]
        command += ["--doctree-dir", str(doctrees), "--fail-on-warning", "--quiet", "--jobs", str(jobs)]
        done = subprocess.run([*command, str(sources), str(out)], check=False)
    if done.returncode == 0:
        shutil.rmtree(out / ".doctrees", ignore_errors=True)
        for name in (".buildinfo", "objects.inv"):
            (out / name).unlink(missing_ok=True)
        (out / "index.html").write_text(_REDIRECT, encoding="utf-8")
    return done.returncode


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python docs/site/build.py FOLDER\n")
        return 2
    out = Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    status = build(ROOT, out)
    if status == 0:
        sys.stdout.write(f"{out / 'index.html'}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())

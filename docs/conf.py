"""The documents as a site: `make site`. Sphinx reads the repository's own files, so that a link that leads somewhere on
a forge does here. What a forge has of itself stands in this file: navigation, links to sources, notebooks."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import draftsmith

ROOT = Path(__file__).resolve().parents[1]
# Sources are linked to where the workflow that publishes the site runs; built elsewhere, they are a part of the site.
FORGE = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
REPOSITORY = f"{FORGE}/{os.environ['GITHUB_REPOSITORY']}" if "GITHUB_REPOSITORY" in os.environ else ""
BRANCH = os.environ.get("GITHUB_REF_NAME", "main")

project = "Draftsmith"
author = "The Draftsmith developers"
release = draftsmith.__version__
root_doc = "README"
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
include_patterns = ["*.md", "docs/**", "benchmarks/README.md", "benchmarks/*/README.md", "data/**/MODEL_CARD.md"]
exclude_patterns = [".*", "**/.*", "site", "build", "runs", "**/__pycache__"]  # not even looked into
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

myst_enable_extensions = ["alert", "html_image", "tasklist"]
myst_heading_anchors = 4
default_role = "code"
highlight_language = "text"  # of blocks that name none: what a command printed
toc_object_entries_show_parents = "hide"
autoclass_content = "both"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80

copybutton_selector = "div.highlight-sh pre, div.highlight-python pre"  # not of what a command printed

html_theme = "furo"
html_title = "Draftsmith"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_theme_options = (
    {"source_repository": f"{REPOSITORY}/", "source_branch": BRANCH, "source_directory": ""} if REPOSITORY else {}
)

# The order of pages; every other page is found by itself, and stands between.
FIRST = {
    "Start": ["docs/getting-started", "docs/tutorial", "docs/python", "docs/results"],
    "Make a head": ["docs/data", "docs/heads", "docs/training"],
    "Use it": ["docs/decoding", "docs/evaluation", "docs/serve"],
    "Guides": [
        "docs/guides/llamacpp",
        "docs/guides/continue-a-head",
        "docs/guides/large-targets",
        "docs/guides/low-acceptance",
        "docs/guides/",
    ],
}
LAST = {
    "Reference": ["docs/command-line", "docs/formats", "docs/models"],
    "Project": ["CONTRIBUTING", "CHANGELOG", "benchmarks/", "data/"],
}


def navigation(pages: set[str]) -> str:
    """Tables of contents for the side of the page, as MyST writes them."""

    def those(wanted: list[str]) -> list[str]:
        """Pages of these names, and of the folders that end in a slash."""
        found = [
            p for name in wanted for p in sorted(pages) if p == name or (name.endswith("/") and p.startswith(name))
        ]
        return list(dict.fromkeys(found))

    first, last = ({caption: those(names) for caption, names in part.items()} for part in (FIRST, LAST))
    rest = sorted(pages - {page for part in (first, last) for chosen in part.values() for page in chosen} - {root_doc})
    trees = [
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *chosen, "```"])
        for caption, chosen in (first | {"Topics": rest} | last).items()
        if chosen
    ]
    return "\n\n" + "\n\n".join(trees)


def notebook(source: str) -> str:
    """A notebook with its outputs as Markdown: results in their form for browsers, what was printed as it was."""
    parts = []
    for cell in json.loads(source)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        printed = ""
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if output["output_type"] == "execute_result" and "text/html" in data:
                parts.append("```{raw} html\n<div class='output'>" + "".join(data["text/html"]) + "</div>\n```")
            else:
                printed += "".join(data.get("text/plain", output.get("text", "")))
        if printed:
            parts.append(f"```{{code-block}} text\n:class: output\n\n{printed}\n```")
    return "\n\n".join(parts)


def sources(folder: Path, text: str, pages: set[str]) -> str:
    """Links to what is no page lead to the repository if that is known; else a file comes along, a folder cannot."""

    def moved(link: re.Match[str]) -> str:
        words, path, part = link.groups(default="")
        place = (folder / path).resolve()
        if not (place.exists() and place.is_relative_to(ROOT)):
            return link[0]  # which Sphinx then warns of
        name = place.relative_to(ROOT)
        if name.with_suffix("").as_posix() in pages:
            return link[0]
        if REPOSITORY:
            kind = "tree" if place.is_dir() else "blob"
            return f"[{words}]({REPOSITORY}/{kind}/{BRANCH}/{name.as_posix()}{part})"
        return words if place.is_dir() else f"[{words}](path:{path})"

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)", moved, text)


def read_source(app: Any, page: str, source: list[str]) -> None:
    file, pages = Path(app.env.doc2path(page)), set(app.env.found_docs)
    if file.suffix == ".ipynb":
        source[0] = notebook(source[0])
    source[0] = sources(file.parent, source[0], pages)
    if page == root_doc:
        source[0] += navigation(pages)


def parameters(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings say `name: what it is. other: what that is.`; here each becomes an entry of a list."""
    try:
        names = list(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return
    known = "|".join(map(re.escape, names)) or "-"
    begins = re.compile(rf"(?:^|(?<=\. ))((?:{known})(?:(?:, | and )(?:{known}))*): ")
    paragraphs = "\n".join(lines).split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        if begins.match(paragraph):
            _, *found = begins.split(" ".join(line.strip() for line in paragraph.splitlines()))
            entries = zip(found[::2], found[1::2], strict=True)
            each = [(name, text.strip()) for some, text in entries for name in re.split(", | and ", some)]
            paragraphs[number] = "\n".join(f":param {name}: {text}" for name, text in each)
    lines[:] = "\n\n".join(paragraphs).split("\n")


def finish(app: Any, failed: Exception | None) -> None:
    """Servers look for an index."""
    if failed is None:
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", parameters, priority=400)  # before napoleon reads the rest
    app.connect("build-finished", finish)

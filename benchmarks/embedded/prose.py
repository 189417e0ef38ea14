"""Questions about Python libraries, answered from their docstrings: turns whose answers do not copy their prompt.

Answers are plain sentences; tables, examples and markup are left out. Whatever is asked about a docstring is in one
split. Libraries repeat sentences from class to class, so training turns that share one with a held-out answer are
dropped.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import docstring_parser

from draftsmith.benchmarks.embedded.corpus import package_root, parse_module, python_files, split_of
from draftsmith.benchmarks.embedded.tasks import Turn

# Package -> SPDX licence. Only licences that allow redistribution with a notice.
PROSE_SOURCES = {
    "stdlib": "PSF-2.0",
    "torch": "BSD-3-Clause",
    "scipy": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "sympy": "BSD-3-Clause",
    "pandas": "BSD-3-Clause",
    "sklearn": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "huggingface_hub": "Apache-2.0",
    "wandb": "MIT",
    "deepspeed": "Apache-2.0",
    "playwright": "Apache-2.0",
    "torchmetrics": "Apache-2.0",
    "tensorboard": "Apache-2.0",
    "datasets": "Apache-2.0",
    "mypy": "MIT",
    "lightning": "Apache-2.0",
    "pydantic": "MIT",
    "accelerate": "Apache-2.0",
    "altair": "BSD-3-Clause",
    "openai": "Apache-2.0",
    "rich": "MIT",
    "_pytest": "MIT",
    "mpmath": "BSD-3-Clause",
    "grpc": "Apache-2.0",
    "werkzeug": "BSD-3-Clause",
    "narwhals": "MIT",
    "jinja2": "BSD-3-Clause",
    "fsspec": "BSD-3-Clause",
    "pygments": "BSD-2-Clause",
    "joblib": "BSD-3-Clause",
    "absl": "Apache-2.0",
    "click": "BSD-3-Clause",
    "packaging": "Apache-2.0",
    "urllib3": "MIT",
    "aiohttp": "Apache-2.0",
    "attr": "MIT",
    "requests": "Apache-2.0",
    "fastapi": "MIT",
}
MIN_ANSWER, MAX_ANSWER = 70, 480  # characters
PROSE_SHARE = 0.93  # letters, spaces, full stops and commas among an answer's characters
MIN_DISTINCT_WORDS = 0.6
SENTENCE_LETTERS = 25  # of a sentence that counts as the same text wherever it stands
_SENTENCES = re.compile(r"""^[A-Z`"'].*[.!?]$""", re.DOTALL)
_MARKUP = re.compile(
    r":[a-z:]+:`~?([^`<]+?)(?:\s*<[^>]+>)?`_*|``([^`]+)``|`~?([^`<]+?)(?:\s*<[^>]+>)?`_*|\[([^\]]+)\]\([^)]*\)"
    r"|(?<!\w)\*{1,2}(\w[^*]*?)\*{1,2}(?!\w)"
)
_CITATION = re.compile(r"\s*\[\w+\]_")


@dataclass(frozen=True)
class Documented:
    """A docstring and what it is about. signature: name and arguments as a reader of the documentation sees them."""

    name: str
    signature: str
    docstring: str
    package: str


def plain(text: str) -> str:
    """Return one line of text without reStructuredText and Markdown marks."""
    joined = _CITATION.sub("", " ".join(text.split()))
    return _MARKUP.sub(lambda found: next(group for group in found.groups() if group), joined).replace("`", "")


def is_prose(text: str) -> bool:
    """Return whether a text is whole sentences of mostly letters, long enough and without repetition."""
    if not MIN_ANSWER <= len(text) <= MAX_ANSWER or not _SENTENCES.match(text) or not text.isascii():
        return False
    if "---" in text or " : " in text:  # a section of numpydoc that the parser did not take for one
        return False
    words = text.lower().split()
    letters = sum(char.isalpha() or char in " ,." for char in text)
    return letters >= PROSE_SHARE * len(text) and len(set(words)) >= MIN_DISTINCT_WORDS * len(words)


def fit_sentences(text: str) -> str:
    """Return as many whole sentences from the start as MAX_ANSWER allows."""
    if len(text) <= MAX_ANSWER:
        return text
    end = max(text.rfind(mark, 0, MAX_ANSWER) for mark in (". ", "! ", "? "))
    return text[: end + 1]


def content_key(docstring: str) -> str:
    """Compute the hash of a docstring's letters, which decides the split."""
    letters = "".join(char for char in docstring.lower() if char.isalpha())
    return hashlib.sha256(letters.encode()).hexdigest()[:16]


def sentences(answer: str) -> set[str]:
    """Return the letters of each longer sentence."""
    letters = ("".join(filter(str.isalpha, part.lower())) for part in re.split(r"(?<=[.!?]) ", answer))
    return {part for part in letters if len(part) >= SENTENCE_LETTERS}


def documented(package: str) -> Iterator[Documented]:
    """Yield functions, classes and modules with a docstring."""
    root = package_root(package)
    if root is None:
        return
    for path in python_files(root):
        tree = parse_module(path)
        if tree is None:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            docstring = ast.get_docstring(node)
            if docstring and not node.name.startswith("test"):
                arguments = [] if isinstance(node, ast.ClassDef) else [*node.args.args, *node.args.kwonlyargs]
                shown = ", ".join(a.arg for a in arguments if a.arg not in ("self", "cls"))
                name = f"{package.lstrip('_')}.{node.name}"
                yield Documented(name, f"{node.name}({shown})", docstring, package)


def _paragraphs(text: str | None) -> list[str]:
    """Return paragraphs of plain prose, in order."""
    made = (fit_sentences(plain(paragraph)) for paragraph in (text or "").split("\n\n"))
    return [paragraph for paragraph in made if is_prose(paragraph)]


def library(item: Documented) -> str:
    """Return the package's public name."""
    return "Python" if item.package == "stdlib" else item.package.lstrip("_")


def turns_of(item: Documented) -> Iterator[tuple[str, str, str]]:
    """Yield (task, prompt, answer) of one docstring."""
    try:
        parsed = docstring_parser.parse(item.docstring)
    except docstring_parser.ParseError:
        return
    about = [plain(parsed.short_description or ""), *_paragraphs(parsed.long_description)]
    head = fit_sentences(" ".join(about[:2]))
    if is_prose(head):
        yield "describe", f"What does {item.signature} of {library(item)} do?", head
    for paragraph in about[2:]:
        yield "details", f"Tell me more about {item.name}. {about[0]}", paragraph
    for parameter in parsed.params:
        for paragraph in _paragraphs(parameter.description)[:1]:
            yield "parameter", f"What is {parameter.arg_name} of {item.name}?", paragraph
    for paragraph in _paragraphs(parsed.returns.description if parsed.returns else None)[:1]:
        yield "returns", f"What does {item.name} return?", paragraph
    for passage in _paragraphs(item.docstring):
        cut = passage.find(". ") + 1
        if cut > 20 and len(passage) - cut > MIN_ANSWER:
            yield "continue", f"Go on: {passage[:cut]}", passage[cut + 1 :]


def prose_turns(seed: int, packages: Sequence[str] | None = None) -> list[Turn]:
    """Every question about every docstring. Where several have the same answer to a task, one of them, at random; no
    sentence of a dev or test answer is in a training answer."""
    found: dict[tuple[str, str], list[Turn]] = defaultdict(list)
    for package in packages or PROSE_SOURCES:
        for item in documented(package):
            key = content_key(item.docstring)
            for task, prompt, answer in turns_of(item):
                found[task, answer].append(
                    Turn(task, key, split_of(key), prompt, answer, package, PROSE_SOURCES[package])
                )
    rng = random.Random(seed)
    chosen = [rng.choice(same) for same in found.values()]
    held_out = set().union(*(sentences(turn.answer) for turn in chosen if turn.split != "train"))
    return [turn for turn in chosen if turn.split != "train" or not sentences(turn.answer) & held_out]


PROSE_TASKS = ("describe", "details", "parameter", "returns", "continue")

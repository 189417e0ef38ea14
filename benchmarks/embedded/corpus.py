"""Functions and import blocks of permissively licensed Python packages: the raw material of the embedded pair.

Python's standard library and packages that are on every machine that installed Draftsmith; those that are not there
(jsonargparse, which earlier versions depended on) are left out. Code is normalised with `ast.unparse`, so that an edit
is an edit of the syntax tree and its result is exact.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Package -> SPDX licence. Only licences that allow redistribution with a notice.
SOURCES = {
    "stdlib": "PSF-2.0",
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "sympy": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "pandas": "BSD-3-Clause",
    "datasets": "Apache-2.0",
    "lightning": "Apache-2.0",
    "wandb": "MIT",
    "huggingface_hub": "Apache-2.0",
    "torchmetrics": "Apache-2.0",
    "jsonargparse": "MIT",
    "rich": "MIT",
    "fsspec": "BSD-3-Clause",
    "mpmath": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "aiohttp": "Apache-2.0",
    "pyarrow": "Apache-2.0",
    "pydantic": "MIT",
    "yaml": "MIT",
}
TESTS = {"test", "tests", "testing"}
VENDORED = {"site-packages", "vendor", "_vendor", "vendored", "idlelib", "lib2to3", "turtledemo"}
MAX_FILE_BYTES = 400_000
MIN_LINES, MAX_LINES = 3, 18
MAX_CHARS = 900


@dataclass(frozen=True)
class Function:
    """One function, normalised. `key` identifies its body: docstring and annotations do not change it."""

    key: str
    name: str
    source: str
    package: str
    licence: str


@dataclass(frozen=True)
class ImportBlock:
    """Consecutive top-level import statements of one module, one line each."""

    key: str
    lines: tuple[str, ...]
    package: str
    licence: str


def package_root(package: str) -> Path | None:
    """Return the folder of an installed package's sources, or None."""
    if package == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def python_files(root: Path) -> list[Path]:
    """Return sorted sources below `root`, without tests and vendored copies."""
    files = (path for path in root.rglob("*.py") if not (TESTS | VENDORED) & set(path.relative_to(root).parts))
    return sorted(path for path in files if path.stat().st_size <= MAX_FILE_BYTES and not path.name.startswith("test_"))


def parse_module(path: Path) -> ast.Module | None:
    """Parse a module; None if it is not ASCII Python of this interpreter's grammar."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(path.read_text(encoding="ascii"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return None


def strip_annotations(function: ast.FunctionDef) -> ast.FunctionDef:
    """Return a copy without annotations in its signature."""
    copy = parse_function(ast.unparse(function))
    copy.returns = None
    arguments = [*copy.args.posonlyargs, *copy.args.args, *copy.args.kwonlyargs, copy.args.vararg, copy.args.kwarg]
    for argument in arguments:
        if argument is not None:
            argument.annotation = None
    return copy


def strip_docstring(function: ast.FunctionDef) -> ast.FunctionDef:
    """Return a copy without its docstring; a body that was nothing else becomes empty."""
    copy = parse_function(ast.unparse(function))
    if ast.get_docstring(copy, clean=False) is not None:
        copy.body = copy.body[1:]
    return copy


def parse_function(source: str) -> ast.FunctionDef:
    """Parse the single function that `source` defines."""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def content_key(function: ast.FunctionDef) -> str:
    """Compute a hash of the function's code without docstring, annotations and name."""
    bare = strip_docstring(strip_annotations(function))
    bare.name = "f"
    # The key decides the split, so it may not depend on the interpreter: 3.12 adds a field, 3.13 hides empty ones.
    if sys.version_info >= (3, 13):
        dumped = ast.dump(bare, show_empty=True)
    else:
        dumped = ast.dump(bare)
    return hashlib.sha256(dumped.replace(", type_params=[]", "").encode()).hexdigest()[:16]


def functions_of(tree: ast.Module, package: str) -> Iterator[Function]:
    """Yield functions of a few lines with a real body, without decorators."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("test"):
            continue
        node.decorator_list = []
        source = ast.unparse(node)
        lines = source.count("\n") + 1
        if not MIN_LINES <= lines <= MAX_LINES or len(source) > MAX_CHARS:
            continue
        if len(strip_docstring(node).body) == 0:
            continue
        yield Function(content_key(node), node.name, source, package, SOURCES[package])


def import_blocks_of(tree: ast.Module, package: str) -> Iterator[ImportBlock]:
    """Yield blocks of 3 to 8 distinct one-line imports."""
    lines: list[str] = []
    for node in [*tree.body, ast.Pass()]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines.append(ast.unparse(node))
            continue
        short = tuple(dict.fromkeys(line for line in lines if len(line) <= 70 and "__future__" not in line))
        lines = []
        if 3 <= len(short) <= 8:
            key = hashlib.sha256("\n".join(sorted(short)).encode()).hexdigest()[:16]
            yield ImportBlock(key, short, package, SOURCES[package])


@dataclass(frozen=True)
class Corpus:
    """All functions and import blocks, deduplicated by content, in a stable order."""

    functions: tuple[Function, ...]
    import_blocks: tuple[ImportBlock, ...]


def read_corpus(packages: Sequence[str] | None = None) -> Corpus:
    """Read all installed SOURCES (or `packages`). Deterministic given the installed versions."""
    functions: dict[str, Function] = {}
    blocks: dict[str, ImportBlock] = {}
    for package in packages or list(SOURCES):
        root = package_root(package)
        if root is None:
            continue
        for path in python_files(root):
            tree = parse_module(path)
            if tree is None:
                continue
            for block in import_blocks_of(tree, package):
                blocks.setdefault(block.key, block)
            for function in functions_of(tree, package):
                functions.setdefault(function.key, function)
    return Corpus(tuple(functions.values()), tuple(blocks.values()))


def split_of(key: str) -> str:
    """Return train, dev or test by content hash: 1/32 each for dev and test, the same for every task."""
    bucket = int(key[:4], 16) % 32
    return {0: "test", 1: "dev"}.get(bucket, "train")

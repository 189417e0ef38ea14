"""Chat turns cut from code: edits, explanations and completions.

A task is a function from a corpus item and a random source to (prompt, answer), or None where it does not apply. Edits
are made on the syntax tree, so the right answer is known exactly.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draftsmith.benchmarks.embedded.corpus import (
    Corpus,
    Function,
    ImportBlock,
    parse_function,
    read_corpus,
    split_of,
    strip_annotations,
    strip_docstring,
)

_NEW_NAMES = """value item data source target index count size name path key text result obj node other config options
first second total flag mode limit start offset buffer entry parent child label state handle record kind level"""
EXCEPTIONS = ["ValueError", "TypeError", "KeyError", "OSError", "RuntimeError", "AttributeError"]
MAX_DOC_CHARS = 160
SORT_IMPORTS_VARIANTS = 4  # import blocks are rarer than functions


@dataclass(frozen=True)
class Turn:
    """One prompt and the right answer. `split` follows from the content hash of what it was made from."""

    task: str
    key: str
    split: str
    prompt: str
    answer: str
    package: str
    licence: str


class _Rename(ast.NodeTransformer):
    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.new, node.ctx) if node.id == self.old else node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self.new, node.annotation) if node.arg == self.old else node


def _identifiers(node: ast.AST) -> set[str]:
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return names | {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}


def _is_simple(node: ast.FunctionDef) -> bool:
    """Return whether no nested scope makes renaming an argument need scope analysis."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Global, ast.Nonlocal)
    return not any(isinstance(child, inner) for child in ast.walk(node) if child is not node)


def _short_docstring(node: ast.FunctionDef) -> str | None:
    """Return the first paragraph of the docstring on one line, or None if it is missing or long."""
    doc = ast.get_docstring(node)
    if not doc:
        return None
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return (
        paragraph if 8 <= len(paragraph) <= MAX_DOC_CHARS and "\\" not in paragraph and '"' not in paragraph else None
    )


def _with_docstring(node: ast.FunctionDef, doc: str) -> str:
    bare = strip_docstring(node)
    bare.body.insert(0, ast.Expr(ast.Constant(doc)))
    return ast.unparse(bare)


def rename(function: Function, rng: random.Random) -> tuple[str, str] | None:
    """Rename one argument."""
    node = strip_docstring(parse_function(function.source))
    arguments = [a.arg for a in [*node.args.args, *node.args.kwonlyargs] if a.arg not in ("self", "cls")]
    if not arguments or not _is_simple(node):
        return None
    old = rng.choice(arguments)
    taken = _identifiers(node)
    free = [name for name in _NEW_NAMES.split() if name not in taken]
    new = rng.choice(free)
    edited = ast.unparse(_Rename(old, new).visit(parse_function(ast.unparse(node))))
    return f"Rename {old} to {new}:\n\n{ast.unparse(node)}", edited


def add_docstring(function: Function, rng: random.Random) -> tuple[str, str] | None:
    """Add the given docstring."""
    node = parse_function(function.source)
    doc = _short_docstring(node)
    if doc is None:
        return None
    return f"Add the docstring: {doc}\n\n{ast.unparse(strip_docstring(node))}", _with_docstring(node, doc)


def remove_docstring(function: Function, rng: random.Random) -> tuple[str, str] | None:
    """Remove the docstring."""
    node = parse_function(function.source)
    doc = _short_docstring(node)
    if doc is None:
        return None
    return f"Remove the docstring:\n\n{_with_docstring(node, doc)}", ast.unparse(strip_docstring(node))


def _annotated(function: Function) -> tuple[str, str, ast.FunctionDef] | None:
    node = strip_docstring(parse_function(function.source))
    bare = ast.unparse(strip_annotations(node))
    full = ast.unparse(node)
    return None if bare == full else (bare, full, node)


def add_type_hints(function: Function, rng: random.Random) -> tuple[str, str] | None:
    """Add the given type hints."""
    found = _annotated(function)
    if found is None:
        return None
    bare, full, node = found
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    hints = [f"{a.arg}: {ast.unparse(a.annotation)}" for a in arguments if a.annotation is not None]
    if node.args.vararg is not None or node.args.kwarg is not None:
        return None
    if node.returns is not None:
        hints.append(f"-> {ast.unparse(node.returns)}")
    listed = ", ".join(hints)
    return (f"Add the type hints: {listed}\n\n{bare}", full) if len(listed) <= 200 else None


def remove_type_hints(function: Function, rng: random.Random) -> tuple[str, str] | None:
    """Remove the type hints of the signature."""
    found = _annotated(function)
    return None if found is None else (f"Remove the type hints:\n\n{found[1]}", found[0])


def wrap_in_try(function: Function, rng: random.Random) -> tuple[str, str] | None:
    """Wrap the body in try; one exception returns None."""
    node = strip_docstring(parse_function(function.source))
    before = ast.unparse(node)
    if "try:" in before:
        return None
    exception = rng.choice(EXCEPTIONS)
    handler = ast.ExceptHandler(ast.Name(exception, ast.Load()), None, [ast.Return(ast.Constant(None))])
    node.body = [ast.Try(node.body, [handler], [], [])]
    return f"Wrap the body in try, on {exception} return None:\n\n{before}", ast.unparse(
        ast.fix_missing_locations(node)
    )


def explain(function: Function, rng: random.Random) -> tuple[str, str] | None:
    """Answer with the first paragraph of the function's docstring."""
    node = parse_function(function.source)
    doc = _short_docstring(node)
    if doc is None:
        return None
    return f"What does this function do?\n\n{ast.unparse(strip_docstring(node))}", doc


def complete(function: Function, rng: random.Random) -> tuple[str, str] | None:
    """Complete the body from signature and docstring."""
    node = parse_function(function.source)
    doc = _short_docstring(node)
    if doc is None:
        return None
    body = ast.unparse(strip_docstring(node)).split("\n", 1)[1]
    head = _with_docstring(node, doc)[: -len(body) - 1]
    return f"Complete this function:\n\n{head}", body


def sort_imports(block: ImportBlock, rng: random.Random) -> tuple[str, str] | None:
    """Sort import lines as text."""
    right = sorted(block.lines)
    shuffled = list(right)
    rng.shuffle(shuffled)
    return None if shuffled == right else ("Sort the imports:\n\n" + "\n".join(shuffled), "\n".join(right))


FunctionTask = Callable[[Function, random.Random], tuple[str, str] | None]
FUNCTION_TASKS: dict[str, FunctionTask] = {
    "rename": rename,
    "add_docstring": add_docstring,
    "remove_docstring": remove_docstring,
    "add_type_hints": add_type_hints,
    "remove_type_hints": remove_type_hints,
    "wrap_in_try": wrap_in_try,
    "explain": explain,
    "complete": complete,
}
EDIT_TASKS = tuple(task for task in FUNCTION_TASKS if task not in ("explain", "complete")) + ("sort_imports",)
# Completions of a model this small loop, and text that repeats itself flatters every drafter: no headline counts them.
HEADLINE_TASKS = (*EDIT_TASKS, "explain")


def turns(corpus: Corpus, seed: int, variant: int = 0) -> list[Turn]:
    """Yield every task on every item it applies to; `variant` redraws names, exceptions and orders."""
    out = []
    for function in corpus.functions:
        for name, task in FUNCTION_TASKS.items():
            made = task(function, random.Random(f"{seed}/{variant}/{function.key}/{name}"))
            if made is not None:
                out.append(Turn(name, function.key, split_of(function.key), *made, function.package, function.licence))
    for block in corpus.import_blocks:
        made = sort_imports(block, random.Random(f"{seed}/{variant}/{block.key}"))
        if made is not None:
            out.append(Turn("sort_imports", block.key, split_of(block.key), *made, block.package, block.licence))
    return out


def edit_turns(seed: int, packages: Sequence[str] | None = None) -> list[Turn]:
    """Return all turns about the installed sources, or about `packages`."""
    corpus = read_corpus(packages)
    made = turns(corpus, seed)
    blocks_only = replace(corpus, functions=())
    for variant in range(1, SORT_IMPORTS_VARIANTS):
        made += [turn for turn in turns(blocks_only, seed, variant) if turn.split == "train"]
    return made

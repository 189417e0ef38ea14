"""The import edges of the architecture, read from the source with `ast`: no file is imported to be checked."""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("modules", "data", "train", "eval", "configs", "launch", "benchmarks")

# Package -> the packages of the project that it may import, itself included.
ALLOWED_PACKAGES = {
    "modules": {"modules"},
    "data": {"data", "modules", "configs"},
    "train": {"train", "modules", "data", "configs"},
    "eval": {"eval", "modules", "data", "configs"},
    "launch": set(PACKAGES) - {"benchmarks"},
    "benchmarks": set(PACKAGES),
    "configs": {"configs"},
}
# Layer inside modules -> the layers it may import; `layer_of` says which file belongs where.
ALLOWED_LAYERS = {
    "types": set(),
    "core": {"types", "core"},
    "targets.base": {"types", "core", "decoding"},
    "decoding": {"types", "core", "targets.base", "decoding"},
    "targets": {"types", "core", "targets.base", "decoding", "targets"},
    "acceptance": {"types", "core", "targets.base", "decoding", "acceptance"},
    "drafters": {"types", "core", "targets.base", "targets", "decoding", "acceptance", "drafters"},
    "formats": {"types", "core", "acceptance", "drafters", "formats"},
    "pretrained": {
        "types",
        "core",
        "targets.base",
        "targets",
        "decoding",
        "acceptance",
        "drafters",
        "formats",
        "pretrained",
    },
}
CORE_FILES = {"engine", "layers", "packing", "diagonal", "transfer", "finite", "sampling", "losses", "metrics", "flops"}
# Files, network, argv, clocks and logging stay out of modules, but for modules/pretrained.
EFFECTS = {"argparse", "http", "io", "logging", "os", "pathlib", "shutil", "socket", "subprocess", "sys", "tempfile",
           "time", "urllib"}  # fmt: skip
TRAIN_ONLY = {"lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "peft", "wandb"}
DRAWING = ("benchmark", "drawing", "files", "page", "sections")
REPORT_PARTS = tuple(f"draftsmith.eval.report.{name}" for name in DRAWING)
CHARTS = ("eval/report/",)
REPORT_ONLY = {"altair", "vl_convert"}  # of the extra `report`; jinja2 comes with transformers too
OPTIONAL = {"deepspeed", "httpx", "peft", "wandb"}  # imported in the function that needs them, everywhere
SLOW_STANDARD = "importlib.metadata"  # reads mail's headers, and takes as long as all of the command line
# What the command line may import before it knows the command; everything else waits.
LIGHT = {"cyclopts", "docstring_parser", "rich", "yaml"}
LIGHT_MODULE = "draftsmith.modules.types."  # the errors that users get
HEAVY = ("torch", "transformers", "lightning", "datasets", "deepspeed", "wandb", "pyarrow", "numpy", "safetensors")


@dataclass(frozen=True)
class Import:
    """One imported module: its absolute dotted name, its line, and when it is imported: with the file, when a function
    is called, or by type checkers alone."""

    name: str
    line: int
    when: Literal["import", "call", "types"]

    @property
    def at_import(self) -> bool:
        return self.when == "import"


def module_name(path: str) -> str:
    """`modules/sampling.py` -> `draftsmith.modules.sampling`; a package's `__init__.py` -> the package."""
    parts = ["draftsmith", *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def dynamic_target(node: ast.AST) -> str | None:
    """The name, or for an f-string its constant beginning, that `import_module(...)` or `__import__(...)` is given."""
    if not (isinstance(node, ast.Call) and node.args):
        return None
    if ast.unparse(node.func).split(".")[-1] not in {"import_module", "__import__"}:
        return None
    argument = node.args[0]
    if isinstance(argument, ast.JoinedStr) and argument.values:
        argument = argument.values[0]
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value.rstrip(".")
    return None


def names_of(node: ast.AST, path: str) -> list[str]:
    """Absolute names that one node imports. `from draftsmith.x import y` gives `draftsmith.x.y`: y may be a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module_name(path).split(".")
            if not path.endswith("__init__.py"):
                package = package[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
        if base.split(".")[0] == "draftsmith":
            return [f"{base}.{alias.name}" for alias in node.names]
        return [base]
    dynamic = dynamic_target(node)
    return [dynamic] if dynamic else []


def imports_of(source: str, path: str) -> Iterator[Import]:
    """Every import of a file, inside functions and under TYPE_CHECKING too."""

    def walk(node: ast.AST, when: Literal["import", "call", "types"]) -> Iterator[Import]:
        for name in names_of(node, path):
            yield Import(name, node.lineno, when)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and when == "import":
            when = "call"
        if is_type_checking(node):
            for child in node.body:
                yield from walk(child, "types")
            for child in node.orelse:
                yield from walk(child, when)
            return
        for child in ast.iter_child_nodes(node):
            yield from walk(child, when)

    yield from walk(ast.parse(source, path), "import")


def layer_of(name: str) -> str | None:
    """Layer of a dotted name below `draftsmith.modules`; None where ALLOWED_LAYERS has no place for it."""
    package, parts = name.split(".")[1:2], name.split(".")[2:]
    if package != ["modules"] or not parts:
        return None
    if parts[0] in CORE_FILES:
        return "core"
    if parts[:2] == ["targets", "base"]:
        return "targets.base"
    return parts[0] if parts[0] in ALLOWED_LAYERS else None


def module_errors(path: str, found: Import) -> Iterator[str]:
    """What is wrong with one import in `modules/`."""
    top = found.name.split(".")[0]
    if top != "draftsmith":
        if path.startswith("modules/pretrained/"):
            return
        allowed = {"torch", "transformers"} if path == "modules/targets/hf.py" else {"torch"}
        if top in EFFECTS:
            yield f"modules has no files, network, argv, clocks or logging: {top}"
        elif top not in sys.stdlib_module_names and top not in allowed:
            yield f"only torch and the standard library in modules: {top}"
        return
    own, other = layer_of(module_name(path)), layer_of(found.name)
    if own is None:  # modules/__init__.py or a new kind of file
        yield f"no layer in ALLOWED_LAYERS for this file, which imports {found.name}"
    elif other is None or (other not in ALLOWED_LAYERS[own]):
        yield f"modules: {own} must not import {other or found.name}"


def errors_of(path: str, found: Import) -> Iterator[str]:
    """What is wrong with one import in one file, `path` relative to the repository root."""
    package = path.split("/")[0]
    name, top = found.name, found.name.split(".")[0]
    if top == "pickle":
        yield "pickle is never read or written"
    if top in PACKAGES:
        yield f"`{name}`: write draftsmith.{name}"
    if top in TRAIN_ONLY and package != "train":
        yield f"{top} belongs in train/ only"
    if top in REPORT_ONLY and not path.startswith(CHARTS):
        yield f"{top} belongs in eval/report/ only"
    if name.startswith(REPORT_PARTS) and not path.startswith(CHARTS) and found.at_import:
        yield f"{name} needs the extra `report`: import it inside a function"
    if top in OPTIONAL and found.at_import:
        yield f"{top} is imported inside the function that needs it"
    if package == "modules":
        yield from module_errors(path, found)
    if top == "draftsmith":
        target = (name.split(".") + [""])[1]
        if package != "modules" and target in PACKAGES and target not in ALLOWED_PACKAGES[package]:
            yield f"{package} must not import {target}"
        light = target in {"launch", "configs"} or name.startswith(LIGHT_MODULE)
        if package == "launch" and found.at_import and target in PACKAGES and not light:
            yield f"launch imports {name} inside a function"
    elif package == "launch" and found.at_import and top not in sys.stdlib_module_names | LIGHT:
        yield f"launch imports {top} inside a function"


def check(source: str, path: str) -> list[str]:
    """All violations of one file as `path:line: what`."""
    return [f"{path}:{found.line}: {error}" for found in imports_of(source, path) for error in errors_of(path, found)]


def source_files() -> list[Path]:
    return sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py") if "__pycache__" not in p.parts)


def test_imports_follow_the_architecture():
    files = source_files()
    assert {p.relative_to(ROOT).parts[0] for p in files} == set(PACKAGES)
    violations = [v for p in files for v in check(p.read_text("utf-8"), p.relative_to(ROOT).as_posix())]
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("modules/losses.py", "import numpy"),
        ("modules/targets/llama.py", "def load():\n    from safetensors.torch import load_file"),
        ("modules/sampling.py", "import time"),
        ("modules/drafters/eagle/head.py", "from draftsmith.data import shards"),
        ("modules/types.py", "from draftsmith.modules.layers import RMSNorm"),
        ("modules/decoding/loop.py", "from ..drafters import eagle"),
        ("modules/decoding/loop.py", "import importlib\nimportlib.import_module(f'draftsmith.modules.drafters.{x}')"),
        ("data/store/shards.py", "import modules.types"),
        ("train/lit.py", "def f():\n    from ..eval import bench"),
        ("train/strategies.py", "import deepspeed"),
        ("eval/bench/command.py", "from lightning.pytorch import Trainer"),
        ("eval/bench/command.py", "import pickle"),
        ("data/heads/card.py", "import altair"),
        ("eval/bench/command.py", "from draftsmith.eval.report.page import render"),
        ("launch/cli.py", "class Command:\n    from draftsmith.modules import sampling"),
    ],
)
def test_a_planted_violation_is_caught_once(path, source):
    assert len(check(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("modules/targets/hf.py", "import math\nimport transformers\nfrom torch.nn import functional as F"),
        ("modules/drafters/eagle/head.py", "import torch\nfrom draftsmith.modules.decoding.protocols import Drafter"),
        ("data/responses.py", "def engine():\n    import httpx"),
        ("train/lit.py", "import lightning\nfrom draftsmith.data.store.datasets import Features"),
        ("launch/cli.py", "import sys\nimport rich\ndef f():\n    import torch\n    from draftsmith.eval import bench"),
        ("launch/cli.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ],
)
def test_an_allowed_import_passes(path, source):
    assert check(source, path) == []


@functools.cache
def house() -> dict[str, list[Import]]:
    """Module -> its imports, of which those of the project are whole modules."""
    paths = {module_name(p.relative_to(ROOT).as_posix()): p for p in source_files()}

    def module_of(name: str) -> str:
        return name if name in paths or name.rpartition(".")[0] not in paths else name.rpartition(".")[0]

    found = {}
    for module, path in paths.items():
        imports = imports_of(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())
        found[module] = [dataclasses.replace(one, name=module_of(one.name)) for one in imports]
    return found


def circle(imports: dict[str, list[Import]]) -> list[str]:
    """One circle of modules that import each other, whenever they do; empty where there is none."""
    edges = {name: {one.name for one in found if one.name in imports} - {name} for name, found in imports.items()}
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    """Not in functions and not for types either."""
    assert circle(house()) == []
    planted = {"a": [Import("b", 1, "import")], "b": [Import("c", 1, "call")], "c": [Import("a", 1, "types")]}
    assert set(circle(planted)) == {"a", "b", "c"}


def packages_behind(module: str, imports: dict[str, list[Import]]) -> set[str]:
    """Packages of others that are imported with a module."""
    seen, found, ahead = {module}, set(), [module]
    while ahead:
        names = {one.name for one in imports[ahead.pop()] if one.at_import}
        found |= {name.split(".")[0] for name in names - imports.keys()} - sys.stdlib_module_names - {"draftsmith"}
        ahead += (names & imports.keys()) - seen
        seen |= names
    return found


def needless(imports: dict[str, list[Import]]) -> Iterator[str]:
    """Imports in functions that spare nothing: all that they bring is there once the file is."""
    for module, found in imports.items():
        there = packages_behind(module, imports)
        for one in found:
            top, own = one.name.split(".")[0], one.name in imports
            if one.when != "call" or (top == "draftsmith" and not own):  # the beginning of a name that is made there
                continue
            if module.startswith("draftsmith.launch") and own and not one.name.startswith("draftsmith.launch"):
                continue  # `errors_of` wants it there
            brought = packages_behind(one.name, imports) if own else {top} - sys.stdlib_module_names
            if brought <= there and one.name != SLOW_STANDARD:
                yield f"{module}:{one.line}: {one.name}"


def test_imports_in_functions_put_off_a_package_that_the_file_does_not_need():
    assert list(needless(house())) == []


@pytest.mark.parametrize("line", ["import json", "import torch.nn", "from draftsmith.modules import types"])
def test_an_import_in_a_function_that_spares_nothing_is_caught(line):
    planted = list(imports_of(f"import torch\ndef f():\n    {line}", "data/responses.py"))
    imports = {"draftsmith.modules.types": [Import("torch", 1, "import")], "draftsmith.data.responses": planted}
    assert len(list(needless(imports))) == 1


@pytest.mark.parametrize("module", ["draftsmith", "draftsmith.launch.cli"])
def test_importing_the_command_line_loads_nothing_heavy(module):
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").rglob("*.y*ml")), ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_a_config_is_a_yaml_mapping_and_a_tree_a_list(path):
    assert path.suffix == ".yaml", "package data holds *.yaml only"
    assert isinstance(yaml.safe_load(path.read_text("utf-8")), list if path.parent.name == "trees" else dict)

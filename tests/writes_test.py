"""Files are written in modules/pretrained/files.py only, read from the source with `ast`.

Elsewhere a full disk or a kill would leave a half-written file, or a traceback.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("modules", "data", "train", "eval", "launch")
# As methods and functions of modules; our own `write_text(path, ...)` and `write_table` are plain functions.
METHODS = {"write_text", "write_bytes", "write_table", "save_file", "save_pretrained", "to_csv", "to_parquet",
           "savefig", "mkdir", "makedirs", "rename", "touch", "symlink_to", "truncate", "tofile"}  # fmt: skip
OF_MODULES = {
    "os": {"replace", "rename", "mkdir", "makedirs", "truncate", "link", "symlink"},
    "json": {"dump"},
    "yaml": {"dump", "safe_dump"},
    "torch": {"save"},
    "np": {"save", "savez"},
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move"},
}
ALLOWED = {
    ("modules/pretrained/gguf.py", "save_pretrained"): "inside of a directory that appears as a whole",
    ("train/checkpoints.py", "open"): "a checkpoint is hashed while it is written; then it is synced and renamed",
    ("train/checkpoints.py", "save"): "into that file",
    ("train/checkpoints.py", "rename"): "a checkpoint that is deleted gets another name first",
}


def writes(source: str) -> list[tuple[str, int]]:
    """(what, line) of each call that writes a file or makes a directory."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        func = node.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        owner = func.value.id if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) else ""
        is_method = isinstance(func, ast.Attribute)
        if owner in OF_MODULES:
            # Without a file `yaml.safe_dump` returns the text.
            hit = name in OF_MODULES[owner] and not (owner == "yaml" and len(node.args) < 2)
        elif name == "open":
            hit = any(mode in ("w", "a", "x", "+") for mode in _mode(node, is_method))
        else:
            # Without a path `to_csv` returns the text.
            hit = (is_method and name in METHODS and not (name == "to_csv" and not node.args)) or name == "save_file"
        if hit:
            found.append((name, node.lineno))
    return found


def _mode(call: ast.Call, is_method: bool) -> str:
    """Of `open(path, mode)` and of `path.open(mode)`."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] or call.args[0 if is_method else 1 :]
    first = given[0] if given else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str) and len(first.value) <= 3:
        return first.value
    return ""


def test_nothing_is_written_past_the_one_way():
    wrong = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            if path == "modules/pretrained/files.py":
                continue
            found = writes(file.read_text("utf-8"))
            wrong += [f"{path}:{line}: {name}" for name, line in found if (path, name) not in ALLOWED]
    assert wrong == []


def test_what_is_allowed_is_there():
    for path, name in ALLOWED:
        assert name in [found for found, _ in writes((ROOT / path).read_text("utf-8"))], (path, name)


def test_planted_writes_are_seen_and_reads_are_not():
    for source in (
        "path.write_text(x)",
        "open(p, 'w')",
        "path.open('a', encoding='utf-8')",
        "open(p, mode='xb')",
        "json.dump(x, file)",
        "pq.write_table(table, path)",
        "os.replace(a, b)",
        "path.mkdir(parents=True)",
        "torch.save(x, path)",
        "yaml.safe_dump(x, file)",
    ):
        assert len(writes(source)) == 1, source
    for source in ("open(p, 'rb')", "write_text(path, x)", "yaml.safe_dump(x)", "text.replace('a', 'b')"):
        assert writes(source) == [], source

"""This project, which is not installed in the engines' environments. Imported before anything of it is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location(
    "draftsmith", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
)
assert spec is not None and spec.loader is not None
sys.modules["draftsmith"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["draftsmith"])
sys.path.insert(0, str(ROOT / "tests"))  # the other tests' helpers

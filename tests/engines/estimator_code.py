"""vLLM's acceptance estimator without a GPU, and this project, which is not installed in the engine's environment.
Imported before either is."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}

import triton
import triton.language
import vllm.triton_utils

vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language  # which they are not where there is no GPU

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location(
    "draftsmith", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
)
assert spec is not None and spec.loader is not None
sys.modules["draftsmith"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["draftsmith"])
sys.path.insert(0, str(ROOT / "tests"))  # the other tests' helpers

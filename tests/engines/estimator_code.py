"""vLLM's acceptance estimator without a GPU, and this project (`own_code`). Imported before either is."""

from __future__ import annotations

import os

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}

import own_code  # noqa: F401
import triton
import triton.language
import vllm.triton_utils

vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language  # which they are not where there is no GPU

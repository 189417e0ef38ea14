"""Results of the hf engine's self-test, kept in the user's cache: a large model on a CPU takes seconds to test."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.store.files import CannotWrite, make_directory, user_cache, write_json
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.self_test import Refusals, self_test


def cached_self_test(model: Any, lm: CausalLM, parallel: str) -> Refusals:
    """Return what the self-test refuses of this model, from the cache if its config was tested before.

    The result depends on the architecture and its settings, on how and where it runs, on both libraries and on our
    code that reads and tests; not on the weights. A model that fails as a whole is tested each time.

    Raises:
        InputError: as of `self_test`.
    """
    import transformers

    config = model.config.to_diff_dict() | {"attention": model.config._attn_implementation}
    how = [str(lm.dtype), lm.device.type, parallel, torch.get_float32_matmul_precision()]
    sources = [Path(inspect.getfile(part)).read_bytes() for part in (type(lm), self_test)]
    code = [lm.info.identity.get("code", ""), *(hashlib.sha256(source).hexdigest() for source in sources)]
    libraries = [torch.__version__, transformers.__version__, *code]
    content = json.dumps([type(model).__name__, config, how, libraries], sort_keys=True, default=str)
    folder = user_cache("self-tests")
    entry = folder and folder / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"
    refusals = _read(entry)
    if refusals is None:
        refusals = self_test(model, lm)
        if entry is not None:
            with contextlib.suppress(CannotWrite):  # a read-only or full disk
                make_directory(entry.parent)
                write_json(entry, asdict(refusals))
    return refusals


def _read(entry: Path | None) -> Refusals | None:
    """Return a cached result; None if there is none, or it is damaged."""
    if entry is None:
        return None
    try:
        content = json.loads(entry.read_text("utf-8"))
        trees, rows = content["trees"], content["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Refusals(trees, rows) if isinstance(trees, str) and isinstance(rows, str) else None

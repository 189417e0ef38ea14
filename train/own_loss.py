"""A loss of the user's own, `--loss FILE.py:FUNCTION`: draft logits and target probabilities [N, V] -> losses [N]."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.modules.losses import TokenLoss
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainDrafterConfig

Config = TypeVar("Config", bound=TrainDrafterConfig)


def loss_name(config: TrainDrafterConfig) -> str:
    """Return FILE.py:FUNCTION of a config, or nothing if its loss is a built-in one."""
    name = getattr(config, "loss", None)
    if not isinstance(name, str):
        return ""
    # Where the default is none, there are no built-in losses to name.
    has_built_in = any(field.name == "loss" and field.default is not None for field in dataclasses.fields(config))
    return "" if has_built_in and ":" not in name else name


def loss_digest(config: TrainDrafterConfig) -> dict[str, str]:
    """Return what a run with a loss of the user's own depends on: `loss`, the beginning of the file's SHA-256.

    Raises:
        InputError: a loss that cannot be loaded.
    """
    if not (name := loss_name(config)):
        return {}
    load_loss(name)
    return {"loss": file_sha256(Path(name.rpartition(":")[0]))[:16]}


def with_loss(config: Config) -> Config:
    """Return the config with the function in place of its name."""
    changes: dict[str, Any] = {"loss": load_loss(name)} if (name := loss_name(config)) else {}
    return dataclasses.replace(config, **changes)


@functools.cache
def load_loss(name: str) -> TokenLoss:
    """Load FILE.py:FUNCTION.

    Raises:
        InputError: no such file or function, or a file that fails.
    """
    path, _, function = name.rpartition(":")
    expected = "FILE.py:FUNCTION, of draft logits [N, V] and target probabilities [N, V]"
    spec = importlib.util.spec_from_file_location(f"loss_{Path(path).stem}", path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise InputError("loss", repr(name), expected, "Name a Python file that exists.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError("loss", f"{path}: {error!r}", "a Python file that runs", "Mend the file.") from error
    if not callable(loss := getattr(module, function, None)):
        raise InputError("loss", f"{path} without a function {function!r}", expected, "Check the name.")
    return loss

"""A head's directory as an object to take apart: config.json and model.safetensors, in any system's layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


class Directory:
    """A head's directory as an object to break."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    def set(self, **changes: Any) -> None:
        """Fields of config.json; None removes one."""
        config = {name: value for name, value in {**self.config, **changes}.items() if value is not None}
        (self.path / "config.json").write_text(json.dumps(config))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "model.safetensors")

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.path / "model.safetensors")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.write({**self.tensors, name: tensor})

    def rename(self, renamed: Callable[[str], str]) -> None:
        self.write({renamed(name): tensor for name, tensor in self.tensors.items()})

    def change(self, name: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.write({**self.tensors, name: changed(self.tensors[name])})

    def remove(self, name: str) -> None:
        self.write({other: tensor for other, tensor in self.tensors.items() if other != name})

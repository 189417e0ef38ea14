"""What `directories.py` wrote, for the engines' tests, which know nothing else of this project."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from defects import DEFECTS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WORLD = Path(os.environ["DRAFTSMITH_ENGINES"])
# Largest differences, one line each, for the end of the run.
FIGURES: list[str] = []
Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


@dataclass(frozen=True)
class Exported:
    """One case: directories, and our own results (see `directories.py`)."""

    target: Path
    directory: Path
    ours: dict[str, Tensor]

    @property
    def state(self) -> dict[str, Tensor]:
        return {name.removeprefix("state."): t for name, t in self.ours.items() if name.startswith("state.")}


def cases(kind: str) -> list[str]:
    """Names of the cases that were exported in that format."""
    found = [path.parent for path in WORLD.glob(f"*/{kind}")]
    names = sorted(case.name for case in found if (case / "ours.safetensors").exists())  # the other ones are served
    assert names, f"{WORLD} has no export in the format {kind}"
    return names


def read(case: str, kind: str) -> Exported:
    return Exported(WORLD / case / "target", WORLD / case / kind, load_file(WORLD / case / "ours.safetensors"))


@dataclass(frozen=True)
class Prediction:
    """What our reader of a format says of a broken directory: `reading.json`, `reading.safetensors` (see there)."""

    raises: list[str]
    errors: list[str]
    notes: list[str]
    dropped: list[str]
    weights: dict[str, Tensor]
    logits: Tensor | None

    @property
    def follows(self) -> bool:
        """Whether it says what is computed, and not only that it is something else."""
        return not any("this check" in text for text in self.errors)


def prediction(place: Path) -> Prediction:
    held = load_file(place / "reading.safetensors")
    weights = {name.removeprefix("weights."): t for name, t in held.items() if name.startswith("weights.")}
    said = json.loads((place / "reading.json").read_text())
    return Prediction(**said, weights=weights, logits=held.get("logits"))


def broken(defect: str, kind: str) -> tuple[Exported, Prediction]:
    place, case = WORLD / "broken" / defect / kind, DEFECTS[defect].case
    return Exported(WORLD / case / "target", place / "directory", read(case, kind).ours), prediction(place)


def edited(exported: Exported, copy: Path, edit: Edit) -> Exported:
    """A copy of the directory after `edit` changed its config and tensors."""
    shutil.copytree(exported.directory, copy)
    config, tensors = json.loads((copy / "config.json").read_text()), load_file(copy / "model.safetensors")
    edit(config, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return Exported(exported.target, copy, exported.ours)


def configured(**fields: Any) -> Edit:
    """An edit that sets these fields of the config; None takes one out."""

    def edit(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        config.update(fields)
        for name in [name for name, value in fields.items() if value is None]:
            config.pop(name, None)

    return edit


# Base 7777, linear scaling by 2: every way of writing it that transformers 5 folds into one. Where both generations are
# there, a `rope_scaling` replaces `rope_parameters`, and the base is then `rope_theta`.
ROPE_SPELLINGS: list[dict[str, Any]] = [
    {"rope_theta": 7777.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 7777.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7777.0}},
    {"rope_theta": 1111.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7777.0}},
    {
        "rope_theta": 7777.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1111.0},
    },
]


def fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters under the names of vLLM and SGLang, which fuse q, k, v and gate, up."""
    result = {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            result["model." + name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name:
            parts = [tensor, state[name.replace("gate_proj", "up_proj")]]
            result["model." + name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            result["model." + name] = tensor
    return result


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """torch.empty gives NaN, as torch promises of its deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def emptied(model: nn.Module) -> dict[str, Tensor]:
    """What the new model's parameters hold; they are NaN afterwards."""
    started = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(torch.nan)
    return started


def assert_loaded(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """All of them and no others, bit by bit; NaN, which stands for what nothing filled, equals nothing."""
    assert sorted(loaded) == sorted(expected)
    for name, parameter in loaded.items():
        assert torch.equal(parameter, expected[name]), name


def settle(loaded: dict[str, Tensor], started: dict[str, Tensor], predicted: dict[str, Tensor]) -> None:
    """Hold an engine's parameters to our reader's, then put what they started with where no tensor filled them.

    loaded: NaN where no tensor filled them. started: what they held before, NaN where that is uninitialised memory.
    predicted: by the engine's names, NaN where our reader says that nothing defined is there.
    """
    assert sorted(loaded) == sorted(predicted)
    for name, expected in predicted.items():
        parameter, undefined = loaded[name], expected.isnan()
        assert parameter.shape == expected.shape, name
        filled = ~parameter.isnan()
        assert not (filled & undefined).any(), f"{name} is filled"
        assert len(started[name][undefined].unique()) != 1, f"{name} starts as a constant"
        held = torch.where(filled, parameter, started[name])
        assert torch.equal(held[~undefined], expected[~undefined]), name
        parameter.data.copy_(torch.where(undefined, torch.nan, held))


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Within float32's rounding: sums of a hundred terms of order 1 in another order, and errors of the target's states
    that pass on; of residual states, which grow with every layer, 5e-6 of the largest. A wrong rotary base alone makes
    1e-2. NaN is the same as NaN."""
    largest = ours[ours.isfinite()].abs().max().item() if ours.isfinite().any() else 0.0
    atol = max(5e-5, 5e-6 * largest)
    return ours.shape == theirs.shape and torch.allclose(theirs, ours, rtol=0, atol=atol, equal_nan=True)


def assert_close(what: str, ours: dict[str, Tensor], **theirs: Tensor) -> None:
    for name, tensor in theirs.items():
        difference = (tensor - ours[name]).abs().max().item()
        FIGURES.append(f"{what} {name}: {difference:.1e} of {ours[name].abs().max().item():.1f}")
        assert same(ours[name], tensor) and not tensor.isnan().any(), name


def assert_quoted(predicted: Prediction, message: str) -> None:
    """An engine stops with one of the messages that our reader quotes; in its own words it says shapes and reasons."""
    said = [text.split(" raises: ")[1].split(";")[0].split(": write")[0] for text in predicted.raises]
    own = ("another shape", "deletes the shared table", "no model architectures are specified")
    assert any(text in message for text in said) or any(words in text for text in said for words in own), message


def assert_drafts_as_predicted(predicted: Prediction, logits: Tensor, exported: Exported, lost: bool) -> None:
    """An engine's logits are what our reader computes, and where they are not those of the file's head, it says so.

    lost: an error is said although the logits are those of our head, of something in config.json that means another.
    """
    assert predicted.logits is not None
    ours = exported.ours["logits"]
    if predicted.follows:
        assert same(predicted.logits[:, : logits.shape[1]], logits)
    held = {name: tensor for name, tensor in predicted.weights.items() if name in exported.state or tensor.any()}
    if not predicted.errors and held.keys() == exported.state.keys():
        assert same(ours, logits), "nothing is said"
    if predicted.errors and not predicted.dropped:
        assert same(ours, logits) == lost, predicted.errors


class CausalAttention(nn.Module):
    """One sequence without a cache, in place of an engine's compiled attention: q, k, v [T, heads * D] in, the heads'
    outputs out. Projections, biases, rotation and scale are the engine's."""

    def __init__(self, heads: int, kv_heads: int, scale: float):
        super().__init__()
        self.heads, self.kv_heads, self.scale = heads, kv_heads, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = len(query)
        query, key, value = (
            x.reshape(rows, heads, -1).transpose(0, 1)
            for x, heads in ((query, self.heads), (key, self.kv_heads), (value, self.kv_heads))
        )
        mixed = F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=self.scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(rows, -1)

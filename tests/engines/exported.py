"""The content of `directories.py`, for the engines' tests, which know nothing else of this project."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from defects import DEFECTS
from safetensors.torch import load_file
from torch import Tensor, nn

WORLD = Path(os.environ["DRAFTSMITH_ENGINES"])
# Largest differences, one line each, for the end of the run.
FIGURES: list[str] = []
# Token ids [N] and fed states [N, H] of one sequence -> logits [N, V], states for the next step [N, H].
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# How an engine refuses a directory, or stops at one that it has loaded.
REFUSALS = (ValueError, AssertionError, RuntimeError, AttributeError, TypeError, IndexError, KeyError)


@dataclass(frozen=True)
class Exported:
    """A directory, its target, our own results (see `directories.py`), and the lines of our check."""

    target: Path
    directory: Path
    ours: dict[str, Tensor]
    problems: list[str]

    @property
    def state(self) -> dict[str, Tensor]:
        return {name.removeprefix("state."): t for name, t in self.ours.items() if name.startswith("state.")}


def cases(kind: str, format: str) -> list[str]:
    """Return the names of the cases that were exported in that format."""
    names = sorted(path.parent.name for path in (WORLD / kind).glob(f"*/{format}"))
    assert names, f"{WORLD} has no export in the format {format}"
    return names


def read(kind: str, case: str, format: str) -> Exported:
    place = WORLD / kind / case
    return Exported(place / "target", place / format, load_file(place / "ours.safetensors"), [])


def command(directory: Path) -> list[str]:
    """Return the words of the command on an export's card."""
    card = (directory / "README.md").read_text().partition("## How to use it")[2]
    return shlex.split(card.split("```")[1].removeprefix("sh"))


def documented(program: str) -> list[list[str]]:
    """Return the words of every command of a program in blocks of the documents, without `...` and what follows #."""
    root, found = Path(__file__).parents[2], list[str]()
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        blocks = "".join(page.read_text().split("```")[1::2]).replace("\\\n", " ")
        found += [line for line in blocks.splitlines() if line.startswith(program)]
    assert found, program
    return [[word for word in shlex.split(line, comments=True) if word != "..."] for line in found]


def asked(kind: str, format: str) -> list[str]:
    """Return the defects of which there is a copy in that format."""
    return [name for name in DEFECTS[kind] if (WORLD / "broken" / kind / name / format).exists()]


def broken(kind: str, defect: str, format: str) -> Exported:
    place, sound = WORLD / "broken" / kind / defect, read(kind, DEFECTS[kind][defect].case, format)
    return Exported(sound.target, place / format, sound.ours, json.loads((place / f"{format}.json").read_text()))


def assert_as_checked(exported: Exported, compute: Callable[[], Tensor], harmless: bool) -> None:
    """Assert that the engine computes our logits exactly if our check has nothing to say.

    compute: loads the directory and returns the logits of the first drafted tokens, and of a second one. harmless: our
        check reports something that this engine ignores, and that means another head elsewhere.
    """
    try:
        logits = compute()
        alike = same(expected_logits(exported.ours, logits.shape[-1]), logits)
    except REFUSALS:
        alike = False
    assert alike == (harmless or not exported.problems), exported.problems
    assert not (harmless and not exported.problems), "the check has nothing to say: not on this list"


def expected_logits(ours: Mapping[str, Tensor], vocab: int) -> Tensor:
    """Return our logits [N, V] of the first token from every row, and of the second one from the last row."""
    logits = ours["logits.0"]
    if "d2t" not in ours:
        return logits
    return whole(torch.cat([logits, ours["logits.1"][-1:]]), ours["d2t"], vocab)


def fused(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our parameters under the names of vLLM and SGLang, which fuse q, k, v and gate, up."""
    named = {
        name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name: t for name, t in state.items()
    }
    result = {}
    for name, tensor in named.items():
        if name == "lm_head.weight":
            result[name] = tensor
        elif ".q_proj." in name:
            parts = [named[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            result["model." + name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name:
            parts = [tensor, named[name.replace("gate_proj", "up_proj")]]
            result["model." + name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            result["model." + name] = tensor
    return result


def both_norms(fused: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the norm by its other name in later layers of EAGLE-3: vLLM and SGLang have both, and read one each."""
    later = {name: t for name, t in fused.items() if not name.startswith("model.layers.0.")}
    return {name.replace("input_layernorm", "hidden_norm"): t for name, t in later.items()} | dict(fused)


@contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """Let torch.empty give NaN, as torch promises of its deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def emptied(model: nn.Module) -> dict[str, Tensor]:
    """Return the new model's parameters, and fill them with NaN."""
    started = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(torch.nan)
    return started


def restore_unfilled(model: nn.Module, started: Mapping[str, Tensor]) -> None:
    """Give parameters that no tensor of the file filled what they started with."""
    for name, parameter in model.named_parameters():
        if name in started and parameter.isnan().all():
            parameter.data.copy_(started[name])


def assert_loaded(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that all of them and no others are there, bit by bit."""
    assert sorted(loaded) == sorted(expected)
    for name, parameter in loaded.items():
        assert torch.equal(parameter, expected[name]), name


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Compare within float32's rounding.

    Sums of a hundred terms of order 1 in another order, and errors of the target's states that pass on; of residual
    states, which grow with every layer, 1e-5 of the largest. A wrong rotary base alone makes 1e-2.
    """
    largest = ours[ours.isfinite()].abs().max().item()
    return ours.shape == theirs.shape and torch.allclose(theirs, ours, rtol=0, atol=max(5e-5, 1e-5 * largest))


def assert_close(what: str, ours: Mapping[str, Tensor], **theirs: Tensor) -> None:
    for name, tensor in theirs.items():
        difference = (tensor - ours[name]).abs().max().item()
        FIGURES.append(f"{what} {name}: {difference:.1e} of {ours[name].abs().max().item():.1f}")
        assert same(ours[name], tensor), name


def drafted(step: Step, ours: Mapping[str, Tensor], fed: Tensor, ttt_steps: int = 2) -> list[Tensor]:
    """Return logits over the target's vocabulary: of every row of the text, then [1, V] of each later drafted token
    behind the last row. fed: [T, H], of the target's states."""
    ids = ours["ids"][1:]
    logits, states = step(ids, fed)
    parts = [logits]
    for _ in range(1, ttt_steps):
        ids, fed = F.pad(ids, (0, 1)), torch.cat([fed, states[-1:]])
        logits, states = step(ids, fed)
        parts.append(logits[-1:])
    return parts


def assert_drafts(what: str, ours: Mapping[str, Tensor], parts: list[Tensor]) -> None:
    """Assert that a draft over the target's vocabulary, of `drafted`, is ours, and drafts nothing else."""
    expected = [ours["logits.0"], *(ours[f"logits.{j}"][-1:] for j in range(1, len(parts)))]
    for j, (logits, own) in enumerate(zip(parts, expected, strict=True)):
        mine = whole(own, ours["d2t"], logits.shape[-1])
        finite = mine.isfinite()
        assert (logits[~finite] == -torch.inf).all()
        assert_close(what, {f"logits.{j}": mine[finite]}, **{f"logits.{j}": logits[finite]})


def unpadded(draft: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters without the rows by which engines round lm_head and the embedding up."""
    rows = {"lm_head.weight": draft.config.draft_vocab_size, "model.embed_tokens.weight": draft.config.vocab_size}
    return {name: t[: rows.get(name)] for name, t in parameters.items()}


def whole(logits: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Return logits [.., draft vocabulary] over the target's vocabulary; tokens that are not drafted have -inf."""
    return logits.new_full((*logits.shape[:-1], vocab), -torch.inf).index_copy_(-1, ids, logits)


class CausalAttention(nn.Module):
    """One sequence without a cache, in place of an engine's compiled attention: q, k, v [T, heads * D] in, the heads'
    outputs out. Projections, biases, rotation, scale and window are the engine's.

    left: tokens before its own that each attends to; None: all.
    """

    def __init__(self, heads: int, kv_heads: int, scale: float, left: int | None):
        super().__init__()
        self.heads, self.kv_heads, self.scale, self.left = heads, kv_heads, scale, left

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = len(query)
        query, key, value = (
            x.reshape(rows, heads, -1).transpose(0, 1)
            for x, heads in ((query, self.heads), (key, self.kv_heads), (value, self.kv_heads))
        )
        seen = torch.ones(rows, rows, dtype=torch.bool).tril().triu(-rows if self.left is None else -self.left)
        mixed = F.scaled_dot_product_attention(
            query[None], key[None], value[None], seen, scale=self.scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(rows, -1)

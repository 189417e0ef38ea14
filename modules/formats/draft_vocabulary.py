"""The draft vocabulary in other systems' directories: `d2t`, what is added to a drafted id, and `t2d`, which of the
target's tokens are drafted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.formats.base import TargetFacts, dtype_name
from draftsmith.modules.formats.reader import Reader
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.types import InputError


def table_fault(ids: Tensor, marks: Tensor | None, vocab: int) -> str:
    """What is wrong with the target's ids [N] of a draft vocabulary, beside its marks; empty where nothing is."""
    if not len(ids):
        return "no tokens"
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        return f"tokens beyond the target's {vocab}"
    if len(ids.unique()) != len(ids):
        return "the same token twice"
    if marks is not None and not torch.equal(marks.nonzero()[:, 0], ids.sort().values):
        return "other tokens than t2d marks"
    return ""


def fill_d2t(reader: Reader, name: str) -> None:
    """The table of the file, as every system reads it: what is added to a drafted id."""
    table, drafted = reader.package.tensors[name], reader.settings["draft_vocab_size"]
    reader.used.append(name)
    if tuple(table.shape) != (drafted,):
        reader.error(name, f"raises: a weight of another shape (file {list(table.shape)}, model [{drafted}])")
        return
    ids = table.long() + torch.arange(drafted)
    if fault := table_fault(ids, reader.package.tensors.get("t2d"), reader.settings["llama"].vocab_size):
        absolute = not table_fault(table.long(), reader.package.tensors.get("t2d"), reader.settings["llama"].vocab_size)
        reason = "the file has ids where all systems want offsets (d2t[i] = id - i)" if absolute else "another head's?"
        reader.error(name, f"adds each entry to its place and drafts {fault}: {reason}")
    reader.weights["d2t"] = ids


def take_vocabulary(  # noqa: C901
    tensors: dict[str, Tensor],
    raw: Mapping[str, Any],
    llama: LlamaConfig,
    target: TargetFacts | None,
    notes: list[str],
) -> int:
    """The size of the draft vocabulary. `tensors` then have `d2t` as ids, ascending, where it is reduced, and an
    lm_head."""
    offsets, marks, vocab = tensors.pop("d2t", None), tensors.pop("t2d", None), llama.vocab_size
    lm_head = tensors.get("lm_head.weight")
    for name, tensor, size in (("d2t", offsets, 1), ("t2d", marks, 1), ("lm_head.weight", lm_head, 2)):
        if tensor is not None and tensor.ndim != size:
            raise InputError(name, f"a tensor {list(tensor.shape)}", f"{size} dimension(s)", "Fetch the head again.")
    if offsets is not None and (offsets.is_floating_point() or offsets.dtype == torch.bool):
        raise InputError("d2t", f"a tensor of {dtype_name(offsets.dtype)}", "whole numbers", "Fetch the head again.")
    drafted = raw.get("draft_vocab_size") or (vocab if lm_head is None else len(lm_head))
    if lm_head is not None and len(lm_head) != drafted:
        remedy = "Correct config.json."
        raise InputError("config.json, draft_vocab_size", drafted, f"the {len(lm_head)} rows of lm_head", remedy)
    ids = torch.arange(vocab)
    if offsets is not None and offsets.numel():
        ids = offsets.long() + torch.arange(len(offsets))
        if table_fault(ids, marks, vocab) and not table_fault(offsets.long(), marks, vocab):
            ids = offsets.long()
            notes.append("d2t has ids in the place of offsets, which no server reads so: they are taken as ids")
    elif drafted != vocab and marks is not None:
        ids = marks.nonzero()[:, 0]
        notes.append("d2t is not in the file: the tokens are those that t2d marks")
    fault = f"{len(ids)} tokens" if len(ids) != drafted else table_fault(ids, marks, vocab)
    if fault:
        expected = f"{drafted} different ones of the target's {vocab}, those that t2d marks"
        raise InputError("d2t", fault, expected, "Fetch the head again.")
    if lm_head is None:
        if target is None or target.lm_head is None:
            raise InputError("lm_head.weight", "none", "one, or the target whose own it is", "Pass --target.")
        tensors["lm_head.weight"] = target.lm_head[ids].clone()
        notes.append("lm_head is not in the file: it is the target's")
    order = ids.argsort()
    if not torch.equal(ids[order], ids):
        ids, tensors["lm_head.weight"] = ids[order], tensors["lm_head.weight"][order]
        notes.append("the draft vocabulary is sorted by id")
    if drafted != vocab:
        tensors["d2t"] = ids
    return drafted

"""The draft vocabulary of a head in other systems' directories: its lm_head and the tables d2t and t2d.

Specified by SafeAILab/EAGLE eagle/model/cnets.py, speculators 0.9.0 (model.py, DraftVocabMixin), and vLLM 0.33
(llama_eagle3.py, qwen3_dflash.py, qwen3_dspark.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.modules.formats.base import Problem
from draftsmith.modules.formats.llama_format import HeadFiles
from draftsmith.modules.llama_config import positive
from draftsmith.modules.types import InputError


def take_vocabulary(files: HeadFiles, vocab: int, by_row: Sequence[str] = ()) -> int:
    """Return the size of the draft vocabulary.

    Replaces the tables by ascending ids `d2t`, if the vocabulary is reduced; adds a missing lm_head. by_row: tensors
    beside lm_head with a row for each drafted token.
    """
    raw, tensors, target = files.raw, files.tensors, files.target
    offsets, marks = tensors.pop("d2t", None), tensors.pop("t2d", None)
    lm_head = tensors.get("lm_head.weight")
    for name, tensor, dims in (("d2t", offsets, 1), ("t2d", marks, 1), ("lm_head.weight", lm_head, 2)):
        if tensor is not None and tensor.ndim != dims:
            raise InputError(name, f"a tensor {list(tensor.shape)}", f"{dims} dimension(s)", "Fetch the head again.")
    rows = vocab if lm_head is None else len(lm_head)
    drafted = positive(raw, "draft_vocab_size", rows) if raw.get("draft_vocab_size") else rows
    if lm_head is not None and len(lm_head) != drafted:
        remedy = "Correct config.json."
        raise InputError("config.json, draft_vocab_size", drafted, f"the {len(lm_head)} rows of lm_head", remedy)
    if drafted != vocab and not raw.get("draft_vocab_size"):
        files.problems.append(Problem("draft_vocab_size", f"is missing, and lm_head has {drafted} rows"))
    ids = drafted_ids(offsets, marks, vocab, drafted, files.problems)
    if len(ids) != drafted or not valid_table(ids, marks, vocab):
        expected = f"{drafted} different ones of the target's {vocab}, those that t2d marks"
        raise InputError("d2t", f"ids of {len(ids)} tokens", expected, "Fetch the head again.")
    if lm_head is None:
        if target is None or target.lm_head is None:
            raise InputError("lm_head.weight", "none", "one, or the target whose own it is", "Pass --target.")
        tensors["lm_head.weight"] = target.lm_head[ids].clone()
        files.notes.append("lm_head is not in the file: it is the target's")
        if drafted != vocab:
            files.problems.append(Problem("lm_head.weight", "is missing, and the target's has rows for other tokens"))
    # Ours are ascending: a training draws the most frequent tokens in any order.
    order = ids.argsort()
    if not torch.equal(ids[order], ids):
        ids, sorted_rows = ids[order], ("lm_head.weight", *by_row)
        tensors |= {name: tensors[name][order] for name in sorted_rows if len(tensors.get(name, ())) == drafted}
        files.notes.append("the draft vocabulary is sorted by id")
    if drafted != vocab:
        tensors["d2t"] = ids
    return drafted


def valid_table(ids: Tensor, marks: Tensor | None, vocab: int) -> bool:
    """Return whether ids [N] are different ones of the target's, those that t2d marks."""
    marked = torch.zeros(vocab, dtype=torch.bool)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        return False
    marked[ids] = True
    return int(marked.sum()) == len(ids) and (marks is None or torch.equal(marked, marks.bool()))


def drafted_ids(
    offsets: Tensor | None, marks: Tensor | None, vocab: int, drafted: int, problems: list[Problem]
) -> Tensor:
    """Return the target's ids of the drafted tokens, by d2t or, without it, by t2d."""
    if offsets is not None and offsets.numel():
        ids = offsets.long() + torch.arange(len(offsets))  # [draft_vocab_size]
        # Some trainers store ids where all servers add the entry to the place; of a GGUF file it was subtracted.
        for other, text in (
            (offsets.long(), "has ids where every server wants offsets (d2t[i] = id - i)"),
            (offsets.long() + 2 * torch.arange(len(offsets)), "has offsets where llama.cpp wants ids"),
        ):
            if not valid_table(ids, marks, vocab) and valid_table(other, marks, vocab):
                problems.append(Problem("d2t", text))
                return other
        return ids
    if drafted == vocab:
        return torch.arange(vocab)
    if marks is None:
        expected = f"the target's ids of lm_head's {drafted} rows (of {vocab} tokens)"
        raise InputError("d2t", "none, and no t2d", expected, "Fetch the head again: nothing else has them.")
    problems.append(Problem("d2t", "is missing: servers take drafted ids for the target's. t2d tells them here"))
    return marks.nonzero()[:, 0]

"""Artefact `rollouts` as a torch data set: one response a sample, with all of its labelled drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.rollouts import FIELDS
from draftsmith.data.store.datasets import ArtefactDataset, Item
from draftsmith.data.store.manifest import open_artefact
from draftsmith.modules.decoding.confidence import TokenConfidences

OPTIONAL = "repeat_mean"


@dataclass(frozen=True)
class RolloutTokens:
    """N labelled drafts of K tokens, text after text, before any drafter has read them.

    texts: the responses, each with its prompt. starts: for each text, where its drafts begin: the place of their first
    token. weight: the probability that a round verifies the token, 0 behind a drafted end token.
    """

    texts: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    owner: Tensor  # [N] int64, the text that each draft hangs off
    temperature: Tensor  # [N] float32
    draft_ids: Tensor  # [N, K] int64
    log_q: Tensor  # [N, K] float32, as all below
    log_max_q: Tensor
    entropy: Tensor
    repeat: Tensor
    log_p: Tensor
    accept_prob: Tensor
    overlap: Tensor
    weight: Tensor
    loss_mask: Tensor  # [N, K] bool
    repeat_mean: Tensor | None = None  # [N, K] float32; labels of earlier versions lack it

    @property
    def confidences(self) -> TokenConfidences:
        """What is known of the drafted tokens, [N, K]."""
        log_q = self.log_q
        depth = torch.arange(1, log_q.shape[1] + 1, device=log_q.device, dtype=log_q.dtype)
        depth, temperature = depth.expand(log_q.shape), self.temperature[:, None].expand(log_q.shape)
        return TokenConfidences(log_q, self.log_max_q, self.entropy, depth, temperature, self.repeat, self.repeat_mean)


class RolloutDataset(ArtefactDataset):
    """Rows of a `rollouts` artefact."""

    def __init__(self, directory: Path, identity: Mapping[str, Any] | None = None, vocab_size: int | None = None):
        manifest = open_artefact(directory, "rollouts", identity)
        self.depth: int = manifest.config["depth"]
        there = {spec.name for spec in manifest.fields} | {spec.name for spec in FIELDS if spec.name != OPTIONAL}
        listed = (spec for spec in FIELDS if spec.dtype.startswith("list") and spec.name in there)
        self._fields = [spec for spec in listed if spec.name != "loss_mask"]  # of an item it is about the drafts
        columns = [spec.name for spec in self._fields if spec.name != "input_ids"]
        super().__init__(directory, manifest, columns, vocab_size)
        # And of the drafts that hang off a response: what it takes to read them.
        self.lengths = self._lists["input_ids"].lengths + self._lists["draft_ids"].lengths

    def item(self, row: int, epoch: int) -> Item:
        """input_ids [T] and starts [S], int64, and what RolloutTokens has of the S drafts."""
        own = {name: values[row] for name, values in self._lists.items()}
        sizes = {"T": len(own["input_ids"]), "S": len(own["starts"]), "K": self.depth}
        item: Item = {}
        for spec in self._fields:
            values = own[spec.name].astype(np.int64 if spec.dtype == "list<int32>" else np.float32)
            item[spec.name] = torch.from_numpy(values).view([sizes[size] for size in spec.shape[0].split("*")])
        weight = item.pop("reached")
        return {**item, "weight": weight, "loss_mask": weight > 0}


def collate_rollouts(items: Sequence[Item]) -> RolloutTokens:
    """The drafts of several responses one after the other."""
    apart = ("input_ids", "starts")
    joined: dict[str, Any] = {name: torch.cat([item[name] for item in items]) for name in items[0] if name not in apart}
    counts = torch.tensor([len(item["starts"]) for item in items])
    return RolloutTokens(
        texts=tuple(tuple(item["input_ids"].tolist()) for item in items),
        starts=tuple(tuple(item["starts"].tolist()) for item in items),
        owner=torch.arange(len(items)).repeat_interleave(counts),
        **joined,
    )

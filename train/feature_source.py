"""Features that are computed in the training process: the frozen target reads the batch right before the head does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.modules.targets.base import CausalLM
from draftsmith.train.feature_cache import FeatureCache
from draftsmith.train.metrics import num_ranks, rank


class FeatureSource:
    """The target's features of a batch, in its own dtype, or as a cache stores them.

    capture: which states they are (`DraftHead.capture`).
    shared: the target's layers are spread over all ranks (`--target-parallel tensor`), which therefore read together:
        every rank calls this, or `join`, for each of its batches, and `finish` where ranks may have unequally many.
    """

    def __init__(
        self, target: CausalLM, capture: tuple[int, ...] = (), cache: FeatureCache | None = None, shared: bool = False
    ):
        self._target, self._capture, self.cache, self.shared = target, capture, cache, shared

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """States [B, T, L*H] of right-padded input_ids [B, T] with `lengths` [B] real tokens each.

        No logits are made, and what is on padding means nothing. With a cache they are written to it, and are what
        reading them from it gives.
        """
        features = self._together(input_ids) if self.shared else self._read(input_ids)
        assert features is not None
        return features if self.cache is None else self._stored(input_ids, lengths, features)

    def join(self) -> None:
        """This rank's batch has its features already: help the others with theirs."""
        if self.shared:
            self._together(None)

    def finish(self) -> None:
        """This rank has no more batches: help the others until none has any, and write what is to be cached."""
        while self.shared and self._together(None, done=True) is not None:
            pass
        self.flush()

    def flush(self) -> None:
        """Write what is to be cached."""
        if self.cache is not None:
            self.cache.flush()

    def _together(self, input_ids: Tensor | None, done: bool = False) -> Tensor | None:
        """All ranks' batches in one call of the target, padded to a common width; this rank's features, None where
        every rank is done."""
        ids = torch.zeros(0, 0, dtype=torch.int64, device=self._target.device) if input_ids is None else input_ids
        own = torch.tensor([*ids.shape, done], device=ids.device)
        shapes = [torch.zeros_like(own) for _ in range(num_ranks())]
        dist.all_gather(shapes, own)
        rows, widths, finished = torch.stack(shapes).T.tolist()
        if all(finished):
            return None
        if not any(rows):
            return ids
        padded = ids.new_zeros(max(rows), max(widths))
        padded[: ids.shape[0], : ids.shape[1]] = ids
        parts = [torch.empty_like(padded) for _ in range(num_ranks())]
        dist.all_gather(parts, padded)
        features = self._read(torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]))
        start = sum(rows[: rank()])
        return features[start : start + ids.shape[0], : ids.shape[1]]

    def _read(self, input_ids: Tensor) -> Tensor:
        return self._target.features(input_ids.to(self._target.device), capture=self._capture).to(input_ids.device)

    def _stored(self, input_ids: Tensor, lengths: Sequence[int], features: Tensor) -> Tensor:
        assert self.cache is not None
        stored = torch.zeros_like(features, dtype=torch.bfloat16)
        for ids, length, row, own in zip(input_ids.cpu(), lengths, features, stored, strict=True):
            own[:length] = self.cache.put(ids[:length], row[:length])
        return stored

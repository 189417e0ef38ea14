"""EAGLE chains that begin at many places of one text, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.branches import SideBySide, as_decoding, branch_mask
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.eagle.chain import EagleDrafter
from draftsmith.modules.drafters.eagle.net import EagleNet
from draftsmith.modules.kv_cache import KVCache
from draftsmith.modules.targets.base import CausalLM


class EagleBranches(SideBySide):
    """Drafts of an EAGLE head, as `EagleDrafter` makes them one at a time: rows of the text are read with the target's
    features, those of a draft with the head's own outputs."""

    min_start = 2  # row t pairs tokens t and t + 1
    model = "eagle"

    def __init__(self, head: EagleNet, target: CausalLM, depth: int):
        """depth: most tokens of a draft."""
        super().__init__(depth, target.device)
        self._target = target
        drafter = EagleDrafter(head, target, FixedLength(1), 1)
        self._stack, self._fc = drafter.stack, drafter.fc
        self._rows = torch.empty(0)  # [T - 1, H] the head's outputs over the text
        self._cache: KVCache | None = None

    def open(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        assert features is not None and len(features) == len(tokens)
        rows = len(tokens) - 1
        self._cache = self._stack.new_cache(1, rows + self._group * (self._depth + 1))
        ids = torch.tensor(tokens[1:], device=self.device)
        with as_decoding(self.device):
            self._rows = self._stack.chain(self._fuse(ids, features[:-1]), self._cache)
        self._cache.length = rows

    def _before(self, starts: Tensor) -> Tensor:
        return self._rows[starts.to(self._rows.device) - 2]

    def _step(self, starts: Tensor, level: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        cache, device = self._cache, self.device
        assert cache is not None, "open a text first"
        positions, visible = branch_mask(starts - 1, len(self._rows), level, 1)
        x = self._fuse(tokens.to(device), hidden)
        hidden = self._stack.graft(x, positions.to(device), visible.to(device), cache)
        cache.length += len(tokens)
        return hidden

    def _drop(self) -> None:
        assert self._cache is not None
        self._cache.keep(len(self._rows))

    def _fuse(self, ids: Tensor, features: Tensor) -> Tensor:
        return self._fc(torch.cat([self._target.embed(ids), features], -1))

    def embed(self, ids: Tensor) -> Tensor:
        return self._target.embed(ids.to(self.device))

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self._target.lm_head(hidden)

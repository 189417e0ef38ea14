"""Heads that draft token by token, from the target's features and then from their own states: EAGLE and its kin.

Chains, trees and branches are drafted here over any `FeatureNet`. A head derives from `FeatureHead` and defines `lean`
and its loss; its methods are one line each (`chains.FixedK`, `trees.StaticTrees`, `trees.DynamicTrees`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from draftsmith.modules.acceptance.tree_rule import TreeRule
from draftsmith.modules.decoding.branches import BranchDrafter, as_decoding, branch_mask
from draftsmith.modules.decoding.stop import FixedLengthStop, StopPolicy
from draftsmith.modules.decoding.tree import DraftTree, DynamicTree, StaticTree
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.growth import Level
from draftsmith.modules.drafters.row_drafter import RowDrafter
from draftsmith.modules.engine.cache import KVCache, as_bias
from draftsmith.modules.engine.lean import LeanStack
from draftsmith.modules.engine.rows import CachedRows, RunLayers, cached_rows, picked_of
from draftsmith.modules.sampling import Source
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


class FeatureNet(Protocol):
    """Network of a head for inference. Pair t is token t + 1 and the feature of token t.

    stack: its layers; their outputs take the place of features behind the text.
    """

    stack: LeanStack

    def project(self, features: Tensor) -> Tensor:
        """Map the target's features [.., F] to states [.., H]."""

    def fuse(self, ids: Tensor, states: Tensor) -> Tensor:
        """Return the layers' input [.., H'] for pairs of ids [..] and states [.., H]."""

    def lm_head(self, states: Tensor) -> Tensor:
        """Return logits [.., V] over the TARGET's vocabulary; -inf for tokens that the head cannot draft."""


class FeatureHead(DraftHead):
    """A `DraftHead` that drafts with a `FeatureNet`, and with the target's embeddings."""

    @abstractmethod
    def lean(self, target: CausalLM) -> FeatureNet:
        """Build its network for inference, in the target's type and on its device."""

    def drafter(self, target: CausalLM, stops: Sequence[StopPolicy], capacity: int) -> FeatureDrafter:
        return FeatureDrafter(self.like(target), target, stops, capacity)

    def tree_drafter(
        self,
        target: CausalLM,
        shape: StaticTree | DynamicTree,
        capacity: int,
        rows: int = 1,
        rules: Sequence[TreeRule] | None = None,
    ) -> FeatureDrafter:
        return FeatureTreeDrafter(self.like(target), target, shape, capacity, rows, rules=rules)

    def branches(self, target: CausalLM, depth: int) -> BranchDrafter:
        return FeatureBranches(self.like(target), target, depth)


def forward(
    net: FeatureNet, run: RunLayers, picked: Tensor | slice | None, ids: Any, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Run pairs through the layers and return logits and states of the picked ones (`engine.rows.Forward`)."""
    if not isinstance(ids, Tensor):
        ids = torch.tensor(ids, device=net.stack.device)
    hidden = run(net.fuse(ids, states))
    if picked is not None:
        hidden = picked_of(hidden, picked)
    return net.lm_head(hidden), hidden


class FeatureDrafter(RowDrafter):
    """Drafts chains.

    Pairs of committed tokens are read with TRUE target features; those drafted on the head's own states are dropped
    from its cache after every round (EAGLE, section 4.3).

    cache: pairs that the head has read of each row. _beside: cache slots for nodes that share a position.
    """

    _beside = 0
    _forward: ClassVar[Callable[..., tuple[Tensor, Tensor]]] = staticmethod(forward)

    def __init__(
        self,
        head: FeatureHead,
        target: CausalLM,
        stops: Sequence[StopPolicy],
        capacity: int,
        static: bool | None = None,
    ):
        """stops: a policy for each row. capacity: most tokens of a row, drafts included. static: see
        `CausalLM.session`."""
        slots = min(capacity, head.config.max_position)
        # The pair of a token stands one place before it, and the last token of a draft is not read.
        super().__init__(stops, longest_text=slots + 2)
        self.model, self.capture = head.kind, head.capture
        self.net = net = head.lean(target)
        self.cache: CachedRows = cached_rows(
            net.stack, partial(self._forward, net), len(self.stops), slots + self._beside, static
        )

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        super().begin(row, prompt, features, first_token)
        self.cache.begin(row)

    def _draft(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        ids, features = [], []
        for row, read, limit in zip(self._rows, self.cache.lengths, limits, strict=True):
            # Pair t holds token t + 1.
            unread = row.tokens[read + 1 :] if limit > 0 else []
            ids.append(unread)
            features.append(self.net.project(row.features[: len(unread)]))
            row.features = row.features[len(unread) :]
        logits, hidden = self.cache.extend((ids, features))
        committed = self.cache.lengths
        trees = self._grow(logits, hidden, limits, params, sources)
        self.cache.keep(committed)
        return trees

    def _grow(
        self,
        logits: Tensor,
        hidden: Tensor,
        limits: Sequence[int],
        params: SamplingParams,
        sources: Sequence[Source],
    ) -> list[DraftTree]:
        """Draft from logits [B, 1, V] and hidden [B, 1, H] of the last pairs read."""
        cache, states = self.cache, hidden[:, 0]

        def step(tokens: list[list[int]] | Tensor) -> tuple[Tensor, Tensor]:
            nonlocal states
            logits, states = cache.step(tokens, states)
            return logits, states

        return self._chains(logits[:, 0], states, step, limits, params, sources)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.cache.select(rows)


class FeatureTreeDrafter(FeatureDrafter):
    """Drafts trees, level by level with one forward of the head each. Nodes are chosen, not sampled."""

    def __init__(
        self,
        head: FeatureHead,
        target: CausalLM,
        shape: StaticTree | DynamicTree,
        capacity: int,
        rows: int = 1,
        static: bool | None = None,
        rules: Sequence[TreeRule] | None = None,
    ):
        self.shape, self.rules = shape, rules
        if isinstance(shape, DynamicTree):
            self._beside, width = shape.depth * shape.topk, shape.topk
        else:
            self._beside = width = len(shape.parents)
        super().__init__(head, target, [FixedLengthStop(1)] * rows, capacity, static)
        # Nodes of a level see themselves and not each other.
        self._own = as_bias(torch.eye(width, dtype=torch.bool, device=target.device), target.dtype)

    def _grow(
        self,
        logits: Tensor,
        hidden: Tensor,
        limits: Sequence[int],
        params: SamplingParams,
        sources: Sequence[Source],
    ) -> list[DraftTree]:
        level, seen = Level(hidden, logits), hidden.new_zeros(len(limits), 1, 0)

        def expand(tokens: Tensor, above: Tensor, depth: int) -> Level:
            nonlocal level, seen
            batch, count = tokens.shape
            above = above[..., None]
            states = level.hidden.gather(1, above.expand(-1, -1, level.hidden.shape[-1]))
            own = self._own[:count, :count].expand(batch, -1, -1)
            # A node sees what its parent sees, and itself: [B, n, nodes so far].
            seen = torch.cat([seen.gather(1, above.expand(-1, -1, seen.shape[-1])), own], -1)
            logits, hidden = self.cache.nodes((tokens, states), seen, depth)
            level = Level(hidden, logits)
            return level

        return self._grown(level, expand, limits, params, sources)


class FeatureBranches(BranchDrafter):
    """Drafts from many places of one text, as `FeatureDrafter` makes them.

    Pairs of the text are read with the target's features, those of a draft with the head's own states.
    """

    # The first pair holds tokens 0 and 1.
    min_start = 2

    def __init__(self, head: FeatureHead, target: CausalLM, depth: int):
        """depth: most tokens of a draft."""
        super().__init__(target, depth)
        self.model, self._net = head.kind, head.lean(target)
        self._cache: KVCache | None = None

    def open(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        assert features is not None and len(features) == len(tokens)
        net, pairs = self._net, len(tokens) - 1
        self._cache = net.stack.new_cache(1, pairs + self._group * (self._depth + 1))
        ids = torch.tensor(tokens[1:], device=self.device)
        with as_decoding(self.device):
            self._text = net.stack.chain(net.fuse(ids, net.project(features[:-1])), self._cache)
        self._cache.length = pairs

    def _step(self, starts: Tensor, level: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        cache, device = self._cache, self.device
        assert cache is not None, "open a text first"
        positions, visible = branch_mask(starts - 1, len(self._text), level, 1)
        x = self._net.fuse(tokens.to(device), hidden)
        hidden = self._net.stack.graft(x, positions.to(device), visible.to(device), cache)
        cache.length += len(tokens)
        return hidden

    def _drop(self) -> None:
        assert self._cache is not None
        self._cache.keep(len(self._text))

    def lm_head(self, hidden: Tensor, level: int | Tensor = 0) -> Tensor:
        return self._net.lm_head(hidden)

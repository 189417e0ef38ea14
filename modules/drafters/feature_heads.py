"""Drafting with an EAGLE head: chains and trees for rows of sequences, and drafts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.tree import TreePredictor
from draftsmith.modules.acceptance.tree_rule import TreeRule
from draftsmith.modules.decoding.branches import SideBySide, as_decoding, branch_mask
from draftsmith.modules.decoding.chain import draft_chains
from draftsmith.modules.decoding.growth import DynamicTree, Level, grow_dynamic, grow_static
from draftsmith.modules.decoding.protocols import NO_DRAFT, DraftTree, Outcome, StopPolicy
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.decoding.tree import StaticTree
from draftsmith.modules.drafters.eagle.net import EagleNet
from draftsmith.modules.finite import blame
from draftsmith.modules.kv_cache import KVCache
from draftsmith.modules.lean import LeanStack, as_bias
from draftsmith.modules.lean_rows import CachedRows, Run, cached_rows, picked_of
from draftsmith.modules.packed import LeanLinear
from draftsmith.modules.sampling import Source
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


class LeanHead:
    """The head's net for inference, beside the target whose embedding and lm_head it uses."""

    def __init__(self, head: EagleNet, target: CausalLM):
        self._target = target
        layers: list = list(head.layers)
        self.stack = LeanStack(layers, head.config.llama, target.dtype, target.device, pack=target.packed)
        self.fc = LeanLinear(head.fc.weight, head.fc.bias, target.packed)

    def fuse(self, ids: Tensor, features: Tensor) -> Tensor:
        """What the layers read, [.., H], of ids [..] and features [.., H]."""
        return self.fc(torch.cat([self._target.embed(ids), features], -1))

    def forward(self, run: Run, picked: Tensor | slice | None, ids: Any, features: Tensor) -> tuple[Tensor, Tensor]:
        """Feed pairs (x_{t+1}, f_t): logits and states of what is picked (`lean_rows.Forward`)."""
        if not isinstance(ids, Tensor):
            ids = torch.tensor(ids, device=self._target.device)
        hidden = picked_of(run(self.fuse(ids, features)), picked)
        return self._target.lm_head(hidden), hidden


class EagleDrafter:
    """Drafts chains with an EAGLE head.

    rows: the pairs that the head has read of each row.

    Pairs of committed tokens are read with TRUE target features; what was drafted on the head's own features is dropped
    from its cache after every round (section 4.3).
    """

    capture: tuple[int, ...] = ()
    needs_features = True

    def __init__(
        self,
        head: EagleNet,
        target: CausalLM,
        stops: Sequence[StopPolicy],
        capacity: int,
        static: bool | None = None,
    ):
        """stops: a policy for each row. capacity: most tokens a row may reach, drafts included. static: as of
        `CausalLM.session`."""
        self.stops = list(stops)
        self._positions = min(capacity, head.config.llama.max_position)
        self._target, self.lean = target, LeanHead(head, target)
        self.rows = self._cached(len(self.stops), static)
        self._stops: list[StopPolicy] = []  # of the rows in use
        self._tokens: list[list[int]] = []  # each row's, committed
        self._ids: list[list[int]] = []  # of them those that the head has not read
        self._features: list[Tensor] = []  # as many
        self._num_drafted: list[int] = []

    def _cached(self, rows: int, static: bool | None) -> CachedRows:
        return cached_rows(self.lean.stack, self.lean.forward, rows, self._positions, static)

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[Tensor], first_tokens: Sequence[int]) -> None:
        self._stops = self.stops[: len(prompts)]
        for stop in self._stops:
            stop.reset()
        self.rows.reset(len(prompts))
        self._tokens = [[*prompt, token] for prompt, token in zip(prompts, first_tokens, strict=True)]
        self._ids, self._features = [tokens[1:] for tokens in self._tokens], list(features)
        self._num_drafted = [0] * len(prompts)

    @blame("eagle")
    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        ends = [
            min(limit, self._positions - length - len(ids) + 1)
            for limit, length, ids in zip(limits, self.rows.lengths, self._ids, strict=True)
        ]
        self._num_drafted = [0] * len(ends)
        if max(ends) < 1:
            return [NO_DRAFT] * len(ends)
        some = [end > 0 for end in ends]
        ids = [own if drafts else [] for own, drafts in zip(self._ids, some, strict=True)]
        features = [own if drafts else own[:0] for own, drafts in zip(self._features, some, strict=True)]
        logits, hidden = self.rows.extend((ids, features))
        committed = self.rows.lengths
        trees = self._draft(logits, hidden, ends, params, sources)
        self.rows.keep(committed)
        self._ids = [[] if drafts else own for own, drafts in zip(self._ids, some, strict=True)]
        self._features = [own[:0] if drafts else own for own, drafts in zip(self._features, some, strict=True)]
        self._num_drafted = [len(tree.tokens) for tree in trees]
        return trees

    def _draft(
        self,
        logits: Tensor,
        hidden: Tensor,
        limits: Sequence[int],
        params: SamplingParams,
        sources: Sequence[Source],
    ) -> list[DraftTree]:
        """A draft from logits [B, 1, V] and hidden [B, 1, H] of the last pairs read."""
        rows, states = self.rows, hidden[:, 0]

        def step(tokens: list[list[int]] | Tensor) -> tuple[Tensor, Tensor]:
            nonlocal states
            logits, states = rows.step(tokens, states)
            return logits, states

        return draft_chains(logits[:, 0], states, step, self._stops, limits, params, sources, self._tokens)

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        for row, outcome in enumerate(outcomes):
            if outcome is None:
                continue
            self.commit(row, outcome.emitted, outcome.features)
            self._stops[row].observe(self._num_drafted[row], outcome.num_accepted)
        self._num_drafted = [0] * len(outcomes)

    def select(self, rows: Sequence[int]) -> None:
        self.rows.select(rows)
        self._stops = [self._stops[row] for row in rows]
        self._tokens = [self._tokens[row] for row in rows]
        self._ids = [self._ids[row] for row in rows]
        self._features = [self._features[row] for row in rows]
        self._num_drafted = [self._num_drafted[row] for row in rows]

    def commit(self, row: int, tokens: Sequence[int], features: Tensor | None) -> None:
        assert features is not None and len(features) == len(tokens)
        self._tokens[row] += tokens
        self._ids[row] += tokens
        before = self._features[row]
        self._features[row] = torch.cat([before, features]) if len(before) else features

    def rewind(self, row: int, length: int) -> None:
        del self._tokens[row][length:]
        pairs = length - 1  # pair t holds token t+1
        lengths = list(self.rows.lengths)
        self._ids[row] = self._ids[row][: max(0, pairs - lengths[row])]
        self._features[row] = self._features[row][: len(self._ids[row])]
        lengths[row] = min(lengths[row], pairs)
        self.rows.keep(lengths)


class EagleTreeDrafter(EagleDrafter):
    """Drafts trees, level by level: one forward of the head a level. Their nodes are chosen, not drawn."""

    def __init__(
        self,
        head: EagleNet,
        target: CausalLM,
        shape: StaticTree | DynamicTree,
        capacity: int,
        rows: int = 1,
        static: bool | None = None,
        acceptance: AcceptanceHead | None = None,
        rules: Sequence[TreeRule] | None = None,
    ):
        """acceptance: a head of trees, whose probabilities are the nodes' values. rules: how far each row's dynamic
        tree is to grow, and how many of its `nodes` to take."""
        assert rules is None or (isinstance(shape, DynamicTree) and shape.value and shape.rerank)
        self.shape, self.rules = shape, rules
        if isinstance(shape, DynamicTree):
            self._room, width = shape.depth * shape.topk, shape.topk
        else:
            self._room = width = len(shape.parents)
        super().__init__(head, target, [FixedLength(1)] * rows, capacity, static)
        self._predictor = (
            None if acceptance is None else TreePredictor(acceptance, target.embed, target.info.vocab_size)
        )
        own = torch.eye(width, dtype=torch.bool, device=target.device)
        self._own = as_bias(own, target.dtype)  # nodes of a level see themselves and not each other

    def _cached(self, rows: int, static: bool | None) -> CachedRows:
        # Nodes of one level share a position but not a slot: the cache is wider than the context.
        return cached_rows(self.lean.stack, self.lean.forward, rows, self._positions + self._room, static)

    def _draft(
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
            features = level.hidden.gather(1, above.expand(-1, -1, level.hidden.shape[-1]))
            own = self._own[:count, :count].expand(batch, -1, -1)
            seen = torch.cat([seen.gather(1, above.expand(-1, -1, seen.shape[-1])), own], -1)
            found = self.rows.nodes((tokens, features), seen, depth)
            level = Level(found[1], found[0])
            return level

        if isinstance(self.shape, StaticTree):
            return grow_static(self.shape, level, expand, limits)
        return grow_dynamic(self.shape, level, expand, limits, params, self._predictor, self._rules)

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[Tensor], first_tokens: Sequence[int]) -> None:
        self._rules = None if self.rules is None else list(self.rules[: len(prompts)])
        super().start(prompts, features, first_tokens)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._rules = None if self._rules is None else [self._rules[row] for row in rows]

    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        trees = super().propose(limits, params, sources)
        self._calls = [tree.draft_calls for tree in trees]
        return trees

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        for row, (outcome, num_nodes) in enumerate(zip(outcomes, self._num_drafted, strict=True)):
            # Rounds that the context's end leaves without a draft teach nothing.
            if self._rules is not None and outcome is not None and num_nodes:
                self._rules[row].observe(num_nodes, self._calls[row], outcome.num_accepted)
        super().advance(outcomes)


class EagleBranches(SideBySide):
    """Drafts of an EAGLE head, as `EagleDrafter` makes them: pairs of the text are read with the target's features,
    those of a draft with the head's own outputs."""

    min_start = 2  # pair t holds tokens t and t + 1
    model = "eagle"

    def __init__(self, head: EagleNet, target: CausalLM, depth: int):
        """depth: most tokens of a draft."""
        super().__init__(depth, target.device)
        self._target, self._lean = target, LeanHead(head, target)
        self._rows = torch.empty(0)  # [T - 1, H] the head's outputs over the text
        self._cache: KVCache | None = None

    def open(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        assert features is not None and len(features) == len(tokens)
        pairs = len(tokens) - 1
        self._cache = self._lean.stack.new_cache(1, pairs + self._group * (self._depth + 1))
        ids = torch.tensor(tokens[1:], device=self.device)
        with as_decoding(self.device):
            self._rows = self._lean.stack.chain(self._lean.fuse(ids, features[:-1]), self._cache)
        self._cache.length = pairs

    def _before(self, starts: Tensor) -> Tensor:
        return self._rows[starts.to(self._rows.device) - 2]

    def _step(self, starts: Tensor, level: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        cache, device = self._cache, self.device
        assert cache is not None, "open a text first"
        positions, visible = branch_mask(starts - 1, len(self._rows), level, 1)
        x = self._lean.fuse(tokens.to(device), hidden)
        hidden = self._lean.stack.graft(x, positions.to(device), visible.to(device), cache)
        cache.length += len(tokens)
        return hidden

    def _drop(self) -> None:
        assert self._cache is not None
        self._cache.keep(len(self._rows))

    def embed(self, ids: Tensor) -> Tensor:
        return self._target.embed(ids.to(self.device))

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self._target.lm_head(hidden)

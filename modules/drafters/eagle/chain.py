"""EAGLE drafts a chain (Li et al. 2024, "EAGLE", section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.chain import draft_chain
from draftsmith.modules.decoding.protocols import DraftTree, Outcome, Source, StopPolicy
from draftsmith.modules.drafters.eagle.net import EagleNet
from draftsmith.modules.finite import blame
from draftsmith.modules.lean import LeanStack
from draftsmith.modules.packed import LeanLinear
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


class EagleDrafter:
    """Drafts a chain with an EAGLE head.

    Rows of committed tokens are read with TRUE target features; what was drafted on the head's own features is dropped
    from its cache after every round (section 4.3).
    """

    needs_features = True

    def __init__(self, head: EagleNet, target: CausalLM, stop: StopPolicy, capacity: int):
        """capacity: most tokens a generation may reach, drafts included."""
        self._target, self.stop = target, stop
        layers: list = list(head.layers)
        self.stack = LeanStack(layers, head.config.llama, target.dtype, target.device, pack=target.packed)
        self.fc = LeanLinear(head.fc.weight, head.fc.bias, target.packed)
        self._positions = min(capacity, head.config.llama.max_position)
        self._cache = self.stack.new_cache(1, self._positions)
        self._tokens: list[int] = []  # committed
        self._ids: list[int] = []  # of them those that the head has not read
        self._features: Tensor | None = None
        self._num_drafted = 0
        self.draft_calls = 0

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        self._cache.keep(0)
        self._tokens = [*prompt, first_token]
        self._ids, self._features = self._tokens[1:], features
        self.stop.reset()

    @blame("eagle")
    def propose(self, max_drafted: int, params: SamplingParams, source: Source) -> DraftTree:
        assert self._features is not None
        cache = self._cache
        self._num_drafted = self.draft_calls = 0
        max_drafted = min(max_drafted, self._positions - cache.length - len(self._ids) + 1)
        if max_drafted < 1:
            return DraftTree((), ())
        states = self._read(self._ids, self._features)[-1:]
        committed = cache.length
        self.draft_calls = 1

        def step(token: int) -> tuple[Tensor, Tensor]:
            nonlocal states
            self.draft_calls += 1
            states = self._read([token], states)
            return self._target.lm_head(states)[0], states

        first = self._target.lm_head(states)[0]
        tree = draft_chain(first, states, step, self.stop, max_drafted, params, source, self._tokens)
        cache.keep(committed)
        self._ids, self._features = [], None
        self._num_drafted = len(tree.tokens)
        return tree

    def _read(self, ids: Sequence[int], features: Tensor) -> Tensor:
        """Feed rows (x_{t+1}, f_t): ids [T], features [T, H] -> hidden [T, H]; the cache keeps them."""
        x = self._fuse(torch.tensor(ids, device=self._target.device), features)
        hidden = self.stack.chain(x, self._cache)
        self._cache.length += len(ids)
        return hidden

    def _fuse(self, ids: Tensor, features: Tensor) -> Tensor:
        """What the layers read, [T, H], of ids [T] and features [T, H]."""
        return self.fc(torch.cat([self._target.embed(ids), features], -1))

    def advance(self, outcome: Outcome) -> None:
        self.commit(outcome.emitted, outcome.features)
        self.stop.observe(self._num_drafted, outcome.num_accepted)

    def commit(self, tokens: Sequence[int], features: Tensor | None) -> None:
        assert features is not None and len(features) == len(tokens)
        self._tokens += tokens
        self._ids += tokens
        self._features = features if self._features is None else torch.cat([self._features, features])

    def rewind(self, length: int) -> None:
        del self._tokens[length:]
        rows = length - 1  # row t holds token t+1
        self._ids = self._ids[: max(0, rows - self._cache.length)]
        self._features = self._features[: len(self._ids)] if self._features is not None and self._ids else None
        self._cache.keep(min(self._cache.length, rows))

"""Heads that draft token by token, from the target's features and then from their own states: EAGLE and its kin.

A head derives from `FeatureHead` and defines `fuse` and its loss; `PairNet` drafts with it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.decoding.drafter import Level
from draftsmith.modules.drafters.base import ConfigT, DraftHead, SettingsT
from draftsmith.modules.drafters.branches import branch_mask, group_of
from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.engine.cache import KVCache, as_bias
from draftsmith.modules.engine.lean import Captured, LeanStack
from draftsmith.modules.engine.rows import cached_rows, select_outputs
from draftsmith.modules.layers import Layer
from draftsmith.modules.targets.base import CausalLM


class FeatureHead(DraftHead[ConfigT, SettingsT]):
    """A head that reads pairs of a token and the target's feature of the token before it. Past the text its own states
    take the place of features.

    Training and decoding share these methods: decoding runs them on a copy with the engine's layers (`DraftHead.lean`).
    """

    @property
    def decoder_layers(self) -> Sequence[Layer]:
        """Its decoder layers, none by default."""
        return ()

    @property
    def rotary_tables(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin [positions, rotary_dim] of its layers; None: those of its config."""
        return None

    def embedding(self, target: CausalLM) -> Callable[[Tensor | Sequence[int]], Tensor]:
        """Return the lookup of the token embeddings [.., H] that it reads."""
        return target.embed

    def read(self, features: Tensor) -> Tensor:
        """Map the target's features [.., F] to states [.., H]."""
        return features

    @abstractmethod
    def fuse(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Return the layers' input [.., H'] for pairs of embeddings and states [.., H]."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the head's states for the layers' outputs [.., H]."""
        return hidden

    def logits(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits [.., V] over the TARGET's vocabulary; -inf for tokens that the head cannot draft.

        lm_head: the target's.
        """
        return lm_head(hidden)

    def net(self, target: CausalLM) -> DraftNet:
        return PairNet(self, PairNetwork(self, target))


class PairNetwork:
    """A head's layers with an embedding before them and an lm_head behind (`engine.rows.Network`)."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, head: FeatureHead, target: CausalLM):
        self.head = head.lean(target)
        self.embed = self.head.embedding(target)
        self.lm_head = head.output or target.lm_head
        layers, tables = self.head.decoder_layers, self.head.rotary_tables
        self.stack = LeanStack(layers, head.config.llama, target.dtype, target.device, tables=tables)

    def inputs(self, ids: Any, states: Tensor) -> Tensor:
        return self.head.fuse(self.embed(ids), states)

    def outputs(self, hidden: Tensor, keep: Tensor | slice | None, captured: Captured | None) -> tuple[Tensor, Tensor]:
        hidden = self.head.normed(hidden if keep is None else select_outputs(hidden, keep))
        return self.head.logits(hidden, self.lm_head), hidden


class PairNet(DraftNet):
    """Reads pairs of committed tokens with TRUE target features, and pairs of drafted tokens with its own states.

    Pair t is token t + 1 and the feature of token t. Drafted pairs leave the cache after every round (EAGLE, section
    4.3). Nodes of a level share a position, and see what their parents see and themselves.
    """

    def __init__(self, head: FeatureHead, network: PairNetwork):
        super().__init__(head.kind, network.stack.device, network.embed)
        self.network, self.aux_layers = network, head.aux_layers
        self._max_position = head.config.max_position

    # -- a sequence

    def allocate(self, capacity: int, depth: int, slots: int = 0, static: bool | None = None) -> None:
        most, reach = min(capacity, self._max_position), self.network.stack.reach
        # The pair of a token stands one place before it, and the last token of a draft is not read.
        self.longest_text = most + 2
        # Slots for the pairs that are read of a draft. With a window what is kept moves to the front when the cache is
        # full.
        self._room = depth + slots
        kept = most if reach is None else min(most, 2 * reach + depth)
        self.cache = cached_rows(self.network, 1, kept + slots, static if self.network.head.recurs else False)
        self._themselves = as_bias(torch.eye(slots, dtype=torch.bool, device=self.device), self.network.stack.dtype)

    def begin(self) -> None:
        self.cache.reset(1)

    def start(self, tokens: Sequence[int], features: Tensor) -> Level:
        unread = tokens[self.cache.lengths[0] + 1 :]
        skipped = self.cache.make_room(len(unread), self._room)
        logits, hidden = self.cache.extend([unread[skipped:]], others=([self.network.head.read(features[skipped:])],))
        self._kept, self._states = self.cache.lengths, hidden[0, -1:]
        return Level(self._states, logits[0])

    def expand(self, tokens: Sequence[int] | Tensor, parents: Tensor | None, depth: int) -> Level:
        if parents is None:
            logits, self._states = self.cache.step(
                tokens[None] if isinstance(tokens, Tensor) else [tokens], self._states
            )
            return Level(self._states, logits)
        assert isinstance(tokens, Tensor)
        if depth == 1:
            self._seen = self._states.new_zeros(1, 0)
        count = len(tokens)
        # Of each node the tree's nodes so far, [n, nodes].
        self._seen = torch.cat([self._seen[parents], self._themselves[:count, :count]], -1)
        logits, states = self.cache.nodes((tokens[None], self._states[parents][None]), self._seen[None], depth)
        self._states = states[0]
        return Level(self._states, logits[0])

    def finish(self, accepted: int) -> None:
        self.cache.keep(self._kept)

    # -- branches

    def open(self, tokens: Sequence[int], features: Tensor | None, depth: int) -> None:
        assert features is not None and len(features) == len(tokens)
        network, pairs = self.network, len(tokens) - 1
        self._text_cache: KVCache = network.stack.new_cache(1, pairs + group_of(depth) * (depth + 1))
        x = network.inputs(tokens[1:], network.head.read(features[:-1]))
        self._text = network.head.normed(network.stack.chain(x, self._text_cache))  # [pairs, H]
        self._text_cache.length = pairs

    def branch(self, starts: Tensor) -> Tensor:
        self._starts = starts
        self._states = self._text[starts.to(self.device) - self.first_start]
        return self._states

    def read(self, tokens: Tensor, depth: int) -> Tensor:
        network, cache = self.network, self._text_cache
        positions, visible = branch_mask(self._starts - 1, len(self._text), depth - 1, 1)
        x = network.inputs(self.ids(tokens), self._states)
        hidden = network.stack.read_masked(x, positions.to(self.device), visible.to(self.device), cache)
        cache.length += len(tokens)
        self._states = network.head.normed(hidden)
        return self._states

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.head.logits(hidden, self.network.lm_head)

    def drop(self) -> None:
        self._text_cache.keep(len(self._text))

"""Drafts that begin at many places of one text, side by side, as the decoder would draft there.

The text is read once. A draft's tokens hang off it: they see the text up to their start, the tokens before them in
their own draft, and nothing else. A draft with start s follows the first s tokens of the text.

S starts, K drafted tokens, T tokens of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.sampling import best_tokens, draw_rows, probabilities
from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.types import SamplingParams, check_range

# Tokens of drafts that are read together. A draft's tokens are computed against the slots of its whole group and masked
# there: a larger group wastes arithmetic, a smaller one calls.
GROUP_TOKENS = 512

GREEDY = SamplingParams()
# (slice of the starts, place in the draft from 0, logits [s, V]) -> tokens [s].
Draw = Callable[[slice, int, Tensor], Tensor]


@dataclass(frozen=True)
class Drafted:
    """Drafts of K tokens from S starts.

    hidden: the drafter's states that predicted the tokens; `BranchDrafter.lm_head` gives their logits.
    """

    tokens: Tensor  # [S, K] int64
    hidden: Tensor  # [S, K, H]


@contextmanager
def as_decoding(device: torch.device) -> Iterator[None]:
    """Compute as decoding does, whatever precision a surrounding training uses for its own weights."""
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield


class BranchedText:
    """A text read by a language model, and branches read off it; one text after another."""

    def __init__(self, lm: CausalLM, depth: int):
        """depth: most tokens of a branch."""
        self._lm, self._device, self.group = lm, lm.device, group_of(depth)
        self._room, self._capacity, self._length = self.group * depth, 0, 0
        self._session: Session | None = None
        self.features = torch.empty(0)  # [T, H] the states after each token of the text

    def open(self, tokens: Sequence[int]) -> None:
        """Read a text in place of the last one."""
        needed = len(tokens) + self._room
        if self._session is None or needed > self._capacity:
            # A power of two is wide enough for most later texts.
            self._capacity = 1 << (needed - 1).bit_length()
            self._session = self._lm.session(1, self._capacity, static=False)
        self._session.reset(1)
        with as_decoding(self._device):
            self.features = self._session.extend([tokens]).features[0]
        self._length = len(tokens)

    def read(self, starts: Sequence[int], branches: Tensor) -> Tensor:
        """Return the states [S, n, H] after the tokens of branches [S, n], and drop the branches."""
        states = []
        for piece in pieces(len(starts), self.group):
            with as_decoding(self._device):
                states.append(self.level(torch.tensor(starts[piece]), 0, branches[piece]))
                self.drop()
        return torch.cat(states)

    def level(self, starts: Tensor, first: int, tokens: Tensor) -> Tensor:
        """Return the states [S, n, H] after tokens [S, n] of branches that have read `first` tokens before them."""
        assert self._session is not None, "open a text first"
        count, levels = tokens.shape
        positions, visible = branch_mask(starts, self._length, first, levels)
        flat = tokens.T.reshape(-1).to(self._device)
        hidden = self._session.read_masked(flat, positions.to(self._device), visible.to(self._device))
        return hidden.view(levels, count, -1).transpose(0, 1)

    def drop(self) -> None:
        """Drop the branches."""
        assert self._session is not None, "open a text first"
        self._session.keep([self._length])


def target_states(text: BranchedText, starts: Sequence[int], drafted: Tensor) -> Tensor:
    """Return the states [S, K, H] of the model before each token of drafts [S, K], one call for each group of drafts.

    `lm_head` of them gives the logits of the model's own tokens there.
    """
    first = text.features[torch.tensor(starts) - 1][:, None]  # [S, 1, H]
    return torch.cat([first, text.read(starts, drafted[:, :-1])], 1) if drafted.shape[1] > 1 else first


def group_of(depth: int) -> int:
    """Return how many drafts of `depth` tokens are read together."""
    return max(1, GROUP_TOKENS // depth)


def pieces(count: int, size: int) -> list[slice]:
    """Cut [0, count) into pieces of at most `size`."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def branch_mask(lengths: Tensor, text: int, first: int, levels: int) -> tuple[Tensor, Tensor]:
    """Return positions and visibility for `levels` more tokens of S branches with `first` tokens in the cache.

    lengths: [S], how many of the `text` slots each branch sees, and so the position of its first token. Slots behind
    the text hold the branches level by level, S in each.

    Returns positions [text + (first + levels) * S] of all slots, and visible [levels * S, the same], bool.
    """
    depth, device = first + levels, lengths.device
    slots, level = torch.arange(text, device=device), torch.arange(depth, device=device)
    positions = torch.cat([slots, (lengths + level[:, None]).flatten()])
    above = level[first:, None] >= level
    own = torch.eye(len(lengths), dtype=torch.bool, device=device)
    branches = above[:, None, :, None] & own[None, :, None]  # [levels, S, depth, S]
    of_text = (slots < lengths[:, None]).repeat(levels, 1)
    return positions, torch.cat([of_text, branches.reshape(levels * len(lengths), -1)], 1)


class BranchDrafter:
    """Drafter of chains from many places of one text: a group of them grows one token at a time. No gradients.

    min_start: the first place that it drafts from. aux_layers, reads_features: as of the net.
    """

    def __init__(self, net: DraftNet, depth: int):
        """depth: most tokens of a draft."""
        check_range("depth", depth, high=net.longest_draft)
        self._net, self._depth, self._group = net, depth, group_of(depth)
        self.min_start, self.device = net.first_start, net.device
        self.aux_layers, self.reads_features = net.aux_layers, net.reads_features

    def open(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Read a text in place of the last one; features [T, F] of the target, if it reads them."""
        with as_decoding(self.device):
            self._net.open(tokens, features, self._depth)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits [.., V] of the drafter's states hidden [.., H]."""
        return self._net.logits(hidden)

    def draft(
        self, starts: Sequence[int], depth: int, params: SamplingParams = GREEDY, uniforms: Tensor | None = None
    ) -> Drafted:
        """Draft `depth` tokens from each of S starts, none before `min_start` or behind the text.

        uniforms: [S, depth] float64 in [0, 1) that draw the tokens, if not greedily.
        """

        def draw(piece: slice, level: int, logits: Tensor) -> Tensor:
            if params.greedy:
                return best_tokens(logits)
            assert uniforms is not None, "drawing needs uniforms"
            return draw_rows(probabilities(logits, params), uniforms[piece, level].to(logits.device))

        return self.grow(starts, depth, draw)

    def grow(self, starts: Sequence[int], depth: int, draw: Draw) -> Drafted:
        """Draft with tokens that the caller draws.

        Raises:
            NonFinite: the drafter's logits.
        """
        assert 0 < depth <= self._depth
        net, drafts, states = self._net, [], []
        for piece in pieces(len(starts), self._group):
            with as_decoding(self.device):
                hidden, tokens = [net.branch(torch.tensor(starts[piece]))], list[Tensor]()
                for level in range(depth):
                    if level:
                        hidden.append(net.read(tokens[-1], level))
                    tokens.append(draw(piece, level, net.logits(hidden[-1])))
                    if NO_TOKEN in tokens[-1]:
                        row = tokens[-1].tolist().index(NO_TOKEN)
                        raise NonFinite(model=net.name, position=level + starts[piece][row])
                net.drop()
            drafts.append(torch.stack(tokens, 1))
            states.append(torch.stack(hidden, 1))
        return Drafted(torch.cat(drafts), torch.cat(states))

    def states(self, starts: Sequence[int], drafted: Tensor) -> Tensor:
        """Return the drafter's states [S, K + 1, H] over drafts [S, K]: before y_1 .. y_K, and the one after y_K.

        So those before the tokens are [:, :-1], and those once it has read them [:, 1:]. A head may be trained on them.
        """
        states = []
        for piece in pieces(len(starts), self._group):
            with as_decoding(self.device):
                first = self._net.branch(torch.tensor(starts[piece]))[:, None]
                read = self._net.read_drafts(drafted[piece])
                self._net.drop()
            # Joined outside inference mode, so that a head can be trained on the result.
            states.append(torch.cat([first, read], 1))
        return torch.cat(states)

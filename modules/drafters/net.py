"""Drafters of chains and trees, above the network that gives states and logits.

A draft grows level by level: `DraftNet.start` gives the logits of its first token, and `expand` those behind drafted
tokens. A chain has one token a level. So every kind of head is one `DraftNet`, and drafts chains (`ChainDrafter`),
trees (`TreeDrafter`), and from many places of a text for labels (`branches.BranchDrafter`).

n nodes of a level, S branches, H hidden size, F width of the target's features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from draftsmith.modules.decoding.chain import draft_chain
from draftsmith.modules.decoding.drafter import Drafter, Level, Outcome
from draftsmith.modules.decoding.growth import grow_dynamic, grow_static
from draftsmith.modules.decoding.stop import StopPolicy
from draftsmith.modules.decoding.tree import NO_DRAFT, DraftTree, DynamicTree, StaticTree
from draftsmith.modules.finite import located
from draftsmith.modules.llama_config import MOST_POSITIONS
from draftsmith.modules.sampling import Sampler


class DraftNet(ABC):
    """Network that drafts for a sequence, or for branches of one text, level by level.

    name: in errors. aux_layers: features of the target that it reads (`CausalLM.session`). reads_features: it reads
        some.
    longest_text: most tokens that a draft may end at. longest_draft: most tokens of a draft.
    one_pass: all levels come from one forward.
    first_start: shortest beginning of a text that a branch may follow. device: of its states.
    """

    one_pass: ClassVar[bool] = False
    reads_features: ClassVar[bool] = True
    aux_layers: tuple[int, ...] = ()
    longest_text = longest_draft = MOST_POSITIONS
    first_start = 2

    def __init__(self, name: str, device: torch.device, embed: Callable[[Tensor], Tensor]):
        """embed: the token embeddings that it reads."""
        self.name, self.device, self.embed = name, device, embed

    # -- a sequence

    def allocate(  # noqa: B027 (some keep nothing of a sequence)
        self, capacity: int, depth: int, slots: int = 0, static: bool | None = None
    ) -> None:
        """Make room for at most `capacity` tokens, drafts included.

        depth: of the longest draft. slots: cache slots for nodes that share positions. static: see `CausalLM.session`.
        """

    def begin(self) -> None:  # noqa: B027
        """Begin a new sequence."""

    @abstractmethod
    def start(self, tokens: Sequence[int], features: Tensor) -> Level:
        """Read what is new, and return the level that the first drafted token follows, which is one node.

        tokens: all committed ones. features: [T, F] of the target that were not passed before.
        """

    def open_round(self, stop: StopPolicy, root: int, limit: int) -> int:
        """Show a policy what the network knows of this round; return the limit, 0 for no draft. root: last token."""
        return limit

    @abstractmethod
    def expand(self, tokens: Sequence[int] | Tensor, parents: Tensor | None, depth: int) -> Level:
        """Read the tokens of a level and return what follows them (`drafter.Expand`)."""

    def finish(self, accepted: int) -> None:  # noqa: B027
        """Drop the draft from the cache. accepted: read tokens of the draft that the text now has; these may stay."""

    def rewind(self, length: int) -> None:
        """Forget what was read behind the first `length` tokens."""
        raise NotImplementedError(f"{self.name} does not rewind")

    # -- branches of one text

    @abstractmethod
    def open(self, tokens: Sequence[int], features: Tensor | None, depth: int) -> None:
        """Read a text in place of the last one, for branches of at most `depth` tokens; features [T, F]."""

    @abstractmethod
    def branch(self, starts: Tensor) -> Tensor:
        """Begin branches behind the first starts[s] tokens; return the states [S, H] that predict what follows."""

    @abstractmethod
    def read(self, tokens: Tensor, depth: int) -> Tensor:
        """Read the next token of every branch, int64 [S], and return the states [S, H] behind them."""

    def read_drafts(self, tokens: Tensor) -> Tensor:
        """Read whole branches [S, K] and return the states [S, K, H] behind their tokens."""
        levels = enumerate(tokens.to(self.device).unbind(1), 1)
        return torch.stack([self.read(own, depth) for depth, own in levels], 1)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [.., V] of states [.., H]."""

    def drop(self) -> None:  # noqa: B027
        """Drop the branches, and keep the text."""

    def ids(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return the tokens of a level as int64 [n] on the device."""
        return torch.as_tensor(tokens, device=self.device)


class NetDrafter(Drafter, ABC):
    """A drafter over a `DraftNet`: the text, limits, and results of rounds."""

    def __init__(self, net: DraftNet, capacity: int, depth: int, slots: int = 0, static: bool | None = None):
        """Allocate the network's caches (`DraftNet.allocate`)."""
        net.allocate(capacity, depth, slots, static)
        self.net, self.aux_layers = net, net.aux_layers
        # All committed tokens, the features that the network has not read yet, and this round's draft until its result.
        self.tokens, self._features, self._tree = list[int](), torch.empty(0), NO_DRAFT

    @abstractmethod
    def _draft(self, root: Level, limit: int, sampler: Sampler) -> DraftTree:
        """Draft at most `limit` (1 or more) tokens deep behind the text."""

    def _observe(self, num_accepted: int) -> None:
        """Show the policy the result of the draft."""

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        self.tokens, self._tree = [*prompt, first_token], NO_DRAFT
        self._features = features if self.net.reads_features else features[:0]
        self.net.begin()

    def propose(self, max_drafted: int, sampler: Sampler) -> DraftTree:
        net, self._tree = self.net, NO_DRAFT
        limit = min(max_drafted, net.longest_draft, net.longest_text - len(self.tokens))
        if limit > 0:
            unread, self._features = self._features, self._features[:0]
            with located(net.name):
                tree = self._draft(net.start(self.tokens, unread), limit, sampler)
            self._tree = replace(tree, draft_calls=1) if net.one_pass and tree.tokens else tree
        return self._tree

    def advance(self, outcome: Outcome) -> None:
        drafted = len(self._tree.tokens)
        self.commit(outcome.emitted, outcome.features)
        self._observe(outcome.num_accepted)
        if drafted:
            # The last token of a draft was not read.
            self.net.finish(min(outcome.num_accepted, drafted - 1))
        self._tree = NO_DRAFT

    def commit(self, tokens: Sequence[int], features: Tensor | None) -> None:
        """Append T tokens; features [T, F] of the tokens before each."""
        self.tokens += tokens
        if self.net.reads_features:
            assert features is not None and len(features) == len(tokens)
            self._features = torch.cat([self._features, features]) if len(self._features) else features


class ChainDrafter(NetDrafter):
    """Drafts chains, each until the policy stops it.

    end_ids: tokens that end a chain.
    """

    def __init__(
        self,
        net: DraftNet,
        stop: StopPolicy,
        capacity: int,
        end_ids: Collection[int] = (),
        static: bool | None = None,
    ):
        super().__init__(net, capacity, stop.max_drafted, static=static)
        self.stop, self.end_ids, self.learners = stop, end_ids, stop.learners

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        super().start(prompt, features, first_token)
        self.stop.reset()

    def _draft(self, root: Level, limit: int, sampler: Sampler) -> DraftTree:
        limit = self.net.open_round(self.stop, self.tokens[-1], limit)
        return draft_chain(root, self.net.expand, self.stop, limit, sampler, self.tokens, self.end_ids)

    def _observe(self, num_accepted: int) -> None:
        self.stop.observe(len(self._tree.tokens), num_accepted)

    def rewind(self, length: int) -> None:
        """Truncate the text to its first `length` tokens."""
        del self.tokens[length:]
        self.net.rewind(length)


class TreeDrafter(NetDrafter):
    """Drafts trees of one shape, level by level with one forward each. Nodes are chosen, or drawn as the shape says."""

    def __init__(
        self,
        net: DraftNet,
        shape: StaticTree | DynamicTree,
        capacity: int,
        static: bool | None = None,
    ):
        super().__init__(net, capacity, shape.levels, shape.slots, static)
        self.shape = shape

    def _draft(self, root: Level, limit: int, sampler: Sampler) -> DraftTree:
        if isinstance(self.shape, StaticTree):
            return grow_static(self.shape, root, self.net.expand, limit, sampler)
        return grow_dynamic(self.shape, root, self.net.expand, limit)

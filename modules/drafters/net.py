"""Drafters of chains and trees for rows of sequences, above the network that gives states and logits.

A draft grows level by level: `DraftNet.start` gives the logits of its first token, and `expand` those behind drafted
tokens. A chain has one token a level. So every kind of head is one `DraftNet`, and drafts chains (`ChainDrafter`),
trees (`TreeDrafter`), and from many places of a text for labels (`branches.BranchDrafter`).

B rows, n nodes of a level, H hidden size, F width of the target's features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftsmith.modules.decoding.chain import draft_chains
from draftsmith.modules.decoding.drafter import Outcome
from draftsmith.modules.decoding.growth import Level, grow_dynamic, grow_static
from draftsmith.modules.decoding.stop import DraftView, Learner, StopPolicy
from draftsmith.modules.decoding.tree import NO_DRAFT, DraftTree, DynamicTree, StaticTree
from draftsmith.modules.decoding.tree_rule import TreeRule
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.layers import MOST_POSITIONS
from draftsmith.modules.sampling import Sampler


@dataclass
class RowState:
    """A row that is drafted for.

    policy: its own, or its rule. tokens: all committed ones. features: [T, F] of the target that the network has not
    read yet. tree: this round's draft, until its result.
    """

    policy: Any
    tokens: list[int]
    features: Tensor
    tree: DraftTree = NO_DRAFT


class DraftNet(ABC):
    """Network that drafts for rows, or for branches of one text, level by level.

    Tokens of a level are int64 [B, n], or of a chain also a list with one or no token for each row. A node's parent is
    a place in the level before. Depth 1 follows the first drafted tokens.

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

    # -- rows

    def allocate(  # noqa: B027 (some keep nothing of a row)
        self, rows: int, capacity: int, depth: int, slots: int = 0, static: bool | None = None
    ) -> None:
        """Make room for rows of at most `capacity` tokens, drafts included.

        depth: of the longest draft. slots: cache slots for nodes that share positions. static: see `CausalLM.session`.
        """

    def begin(self, row: int) -> None:  # noqa: B027
        """Begin a new sequence in this row, or in one more behind those in use."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Keep these rows only, in this order."""

    @abstractmethod
    def start(self, rows: Sequence[RowState], limits: Sequence[int]) -> Level:
        """Read what is new of each row with a limit above 0, and return the level that the first tokens follow."""

    def open_round(self, rows: Sequence[RowState], limits: Sequence[int]) -> Sequence[int]:
        """Show the rows' policies what the network knows of this round; return limits of 0 for rows without a draft."""
        return limits

    def expand(self, tokens: Any, parents: Tensor | None, depth: int) -> Level:
        """Read the tokens of a level and return what follows them. parents: [B, n] int64; None for a chain."""
        hidden = self.read(tokens, parents, depth)
        return Level(hidden, self.logits(hidden))

    def step(self, tokens: list[list[int]] | Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Expand chains: return logits [B, V] and states [B, H]."""
        hidden, logits = self.expand(tokens, None, depth)
        return logits[:, 0], hidden[:, 0]

    def finish(self, accepted: Sequence[int]) -> None:  # noqa: B027
        """Drop the draft from the cache. accepted: read tokens of each row's draft that the text now has; may stay."""

    def rewind(self, row: int, length: int) -> None:
        """Forget what was read of a row behind its first `length` tokens."""
        raise NotImplementedError(f"{self.name} does not rewind")

    # -- branches of one text, which rows may be too

    @abstractmethod
    def open(self, tokens: Sequence[int], features: Tensor | None, depth: int) -> None:
        """Read a text in place of the last one, for branches of at most `depth` tokens; features [T, F]."""

    @abstractmethod
    def branch(self, starts: Tensor) -> Tensor:
        """Begin branches behind the first starts[s] tokens; return the states [S, H] that predict what follows."""

    @abstractmethod
    def read(self, tokens: Any, parents: Tensor | None, depth: int) -> Tensor:
        """Read the tokens of a level and return the states [S, n, H] behind them."""

    def read_drafts(self, tokens: Tensor) -> Tensor:
        """Read whole branches [S, K] and return the states [S, K, H] behind their tokens."""
        levels = enumerate(tokens.to(self.device).split(1, 1), 1)
        return torch.cat([self.read(own, None, depth) for depth, own in levels], 1)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [.., V] of states [.., H]."""

    def drop(self) -> None:  # noqa: B027
        """Drop the branches, and keep the text."""

    def ids(self, tokens: Any) -> Tensor:
        """Return the tokens of a level as int64 [B, n] on the device; rows whose chain has ended read token 0."""
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor([row or [0] for row in tokens])
        return tokens.to(self.device)


class RowDrafter(ABC):
    """A `Drafter` over a `DraftNet`: texts, limits, and results of rounds.

    policies: a stop policy or a rule of trees for each row that there may be, or None for each. A row that begins
        behind those in use takes the first one that is free.
    """

    def __init__(
        self,
        net: DraftNet,
        policies: Sequence[Any],
        capacity: int,
        depth: int,
        slots: int = 0,
        static: bool | None = None,
    ):
        """Allocate the network's rows (`DraftNet.allocate`)."""
        net.allocate(len(policies), capacity, depth, slots, static)
        self.net, self.policies, self.aux_layers = net, list(policies), net.aux_layers
        self._rows: list[RowState] = []  # in use

    @property
    def learners(self) -> Sequence[Learner]:
        """Parts that learn from the results of rounds."""
        return [learner for policy in self.policies if policy for learner in policy.learners]

    @abstractmethod
    def _draft(self, root: Level, limits: Sequence[int], sampler: Sampler) -> list[DraftTree]:
        """Draft behind the rows' texts; nothing for a limit below 1."""

    @abstractmethod
    def _observe(self, row: RowState, num_accepted: int) -> None:
        """Show a row's policy or rule the result of its draft."""

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        used = [own.policy for own in self._rows]
        free = (policy for policy in self.policies if policy not in used)
        policy = used[row] if row < len(used) else next(free, None)
        features = features if self.net.reads_features else features.new_empty(0)
        self._rows[row : row + 1] = [RowState(policy, [*prompt, first_token], features)]
        self.net.begin(row)

    def propose(self, limits: Sequence[int], sampler: Sampler) -> list[DraftTree]:
        net, rows = self.net, self._rows
        limits = [
            min(limit, net.longest_draft, net.longest_text - len(row.tokens))
            for limit, row in zip(limits, rows, strict=True)
        ]
        trees = [NO_DRAFT] * len(limits)
        if max(limits) > 0:
            try:
                trees = self._draft(net.start(rows, limits), limits, sampler)
            except NonFinite as error:
                error.model = error.model or net.name
                raise
            if net.one_pass:
                trees = [replace(tree, draft_calls=1) if tree.tokens else tree for tree in trees]
        for row, tree in zip(rows, trees, strict=True):
            row.tree = tree
        return trees

    def advance(self, outcomes: Sequence[Outcome | None]) -> None:
        accepted, drafted = [0] * len(outcomes), False
        for place, (row, outcome) in enumerate(zip(self._rows, outcomes, strict=True)):
            if outcome is not None:
                # The last token of a draft was not read.
                accepted[place] = max(0, min(outcome.num_accepted, len(row.tree.tokens) - 1))
                self.commit(place, outcome.emitted, outcome.features)
                self._observe(row, outcome.num_accepted)
            drafted, row.tree = drafted or bool(row.tree.tokens), NO_DRAFT
        if drafted:
            self.net.finish(accepted)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        self.net.select(rows)

    def commit(self, row: int, tokens: Sequence[int], features: Tensor | None) -> None:
        """Append T tokens to a row; features [T, F] of the tokens before each."""
        own = self._rows[row]
        own.tokens += tokens
        if self.net.reads_features:
            assert features is not None and len(features) == len(tokens)
            own.features = torch.cat([own.features, features]) if len(own.features) else features


class ChainDrafter(RowDrafter):
    """Drafts chains, each until its row's policy stops it.

    end_ids: tokens that end a chain. on_token: called with the row and the view of every drafted token.
    """

    on_token: Callable[[int, DraftView], None] | None = None

    def __init__(
        self,
        net: DraftNet,
        stops: Sequence[StopPolicy],
        capacity: int,
        end_ids: Collection[int] = (),
        static: bool | None = None,
    ):
        """stops: a policy for each row."""
        super().__init__(net, stops, capacity, max(stop.max_drafted for stop in stops), static=static)
        self.end_ids = end_ids

    def begin(self, row: int, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        super().begin(row, prompt, features, first_token)
        self._rows[row].policy.reset()

    def _draft(self, root: Level, limits: Sequence[int], sampler: Sampler) -> list[DraftTree]:
        stops, texts = [row.policy for row in self._rows], [row.tokens for row in self._rows]
        limits, logits, hidden = self.net.open_round(self._rows, limits), root.logits[:, 0], root.hidden[:, 0]
        return draft_chains(logits, hidden, self.net.step, stops, limits, sampler, texts, self.end_ids, self.on_token)

    def _observe(self, row: RowState, num_accepted: int) -> None:
        row.policy.observe(len(row.tree.tokens), num_accepted)

    def rewind(self, row: int, length: int) -> None:
        """Truncate a row to its first `length` tokens."""
        del self._rows[row].tokens[length:]
        self.net.rewind(row, length)


class TreeDrafter(RowDrafter):
    """Drafts trees of one shape, level by level with one forward each. Nodes are chosen, or drawn if the shape says so.

    rules: size of each row's dynamic tree.
    """

    def __init__(
        self,
        net: DraftNet,
        shape: StaticTree | DynamicTree,
        capacity: int,
        rows: int = 1,
        rules: Sequence[TreeRule] | None = None,
        static: bool | None = None,
    ):
        super().__init__(net, rules or [None] * rows, capacity, shape.levels, shape.slots, static)
        self.shape = shape

    def _draft(self, root: Level, limits: Sequence[int], sampler: Sampler) -> list[DraftTree]:
        if isinstance(self.shape, StaticTree):
            return grow_static(self.shape, root, self.net.expand, limits, sampler)
        rules = [row.policy for row in self._rows if row.policy]
        return grow_dynamic(self.shape, root, self.net.expand, limits, rules or None)

    def _observe(self, row: RowState, num_accepted: int) -> None:
        # At the context's end a round may have no draft, which the rule learns nothing from.
        if row.policy and row.tree.tokens:
            row.policy.observe(len(row.tree.tokens), row.tree.draft_calls, num_accepted)

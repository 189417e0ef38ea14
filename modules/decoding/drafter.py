"""Interface of drafters: each proposes drafts for a sequence and takes in the target's verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from draftsmith.modules.decoding.stop import Learner
from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.sampling import Sampler


class Level(NamedTuple):
    """States of a drafter's network behind the n nodes of one level, and the logits of what follows them."""

    hidden: Tensor  # [n, H]
    logits: Tensor  # [n, V]


# (tokens, parents, depth) -> Level: reads the nodes of a level. tokens: int64 [n] on the device; of a chain, which has
# one node a level, also a list of its id. parents: int64 [n], places in the level before; None for a chain. depth: from
# 1, the first drafted tokens.
Expand = Callable[[Sequence[int] | Tensor, Tensor | None, int], Level]


@dataclass(frozen=True)
class Outcome:
    """Result of a round, for the drafter.

    emitted: accepted tokens, then the target's own token.
    features: [len(emitted), F] of the root and of the accepted tokens; row i predicts emitted[i].
    logits: [N + 1, V] of the root and of all N nodes, rejected ones too.
    """

    emitted: tuple[int, ...]
    num_accepted: int
    features: Tensor
    logits: Tensor


class Drafter(Protocol):
    """Proposes drafts for one sequence after the other.

    aux_layers: features of the target that it reads (`targets.base.CausalLM.session`). learners: parts that learn from
    the results of rounds.
    """

    aux_layers: tuple[int, ...] = ()
    learners: Sequence[Learner] = ()

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        """Begin a new sequence.

        prompt: T tokens, with the target's features [T, F]. first_token: emitted after it.
        """

    def propose(self, max_drafted: int, sampler: Sampler) -> DraftTree:
        """Draft at most `max_drafted` (1 or more) tokens deep, after all emitted tokens."""

    def advance(self, outcome: Outcome) -> None:
        """Take in the result of every round but the last, also of one without a draft."""

"""A small language model drafts a chain (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftsmith.modules.decoding.chain import draft_chain
from draftsmith.modules.decoding.protocols import DraftTree, Outcome, Source, StopPolicy
from draftsmith.modules.finite import blame
from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.types import SamplingParams


class DraftModelDrafter:
    """Reads what was emitted into its own cache and drafts until the stop policy ends the chain.

    Emitted tokens that it has not read are one after a rejection, and two after a fully accepted draft, whose last
    token was never fed. They go into one forward with the first draft step, so no call is spent on catching up.
    """

    needs_features = False

    def __init__(self, lm: CausalLM, stop: StopPolicy, capacity: int):
        """capacity: most tokens a generation may reach, drafts included."""
        self._lm, self.stop = lm, stop
        self._session: Session = lm.session(min(capacity, lm.info.max_position))
        self._tokens: list[int] = []  # committed, of which the session keeps the first `_read`
        self._read = 0
        self._num_drafted = 0
        self.draft_calls = 0

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        self._session.keep(0)
        self._tokens, self._read = [*prompt, first_token], 0
        self.stop.reset()

    @blame("draft")
    def propose(self, max_drafted: int, params: SamplingParams, source: Source) -> DraftTree:
        session = self._session
        # The draft's context may be shorter than the target's: past it there are no drafts, rather than bad ones.
        max_drafted = min(max_drafted, self._lm.info.max_position - len(self._tokens) + 1)
        self._num_drafted = self.draft_calls = 0
        if max_drafted < 1:
            return DraftTree((), ())
        scores = session.extend(self._tokens[self._read :])
        self._read = len(self._tokens)
        self.draft_calls = 1

        def step(token: int) -> tuple[Tensor, Tensor]:
            self.draft_calls += 1
            scores = session.extend([token])
            return scores.logits[0], scores.features

        tree = draft_chain(
            scores.logits[0], scores.features, step, self.stop, max_drafted, params, source, self._tokens
        )
        self._num_drafted = len(tree.tokens)
        return tree

    def advance(self, outcome: Outcome) -> None:
        # All drafted tokens but the last were read while drafting.
        self._read += max(0, min(outcome.num_accepted, self._num_drafted - 1))
        self._session.keep(self._read)
        self._tokens += outcome.emitted
        self.stop.observe(self._num_drafted, outcome.num_accepted)

    def commit(self, tokens: Sequence[int], features: Tensor | None) -> None:
        self._tokens += tokens

    def rewind(self, length: int) -> None:
        del self._tokens[length:]
        self._read = min(self._read, length)
        self._session.keep(self._read)

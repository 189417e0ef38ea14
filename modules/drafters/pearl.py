"""PEARL: the draft model drafts on while the target verifies (Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from draftsmith.modules.decoding.drafter import Drafter, EachRow, Outcome
from draftsmith.modules.decoding.tree import MAX_NODES, DraftTree, chain_parents
from draftsmith.modules.drafters.method import Method, Models
from draftsmith.modules.finite import located
from draftsmith.modules.sampling import Sampler
from draftsmith.modules.targets.base import CausalLM


class PearlDrafter:
    """Drafts `k` tokens a round beyond those that wait for verification.

    The target reads the waiting tokens and verifies these and the first new one. With none waiting that is the paper's
    pre-verification (the first token of a draft is verified while the rest is drafted), else its post-verification
    (drafting continues while a draft is verified). Drafting needs nothing of the same round's target call, and the call
    only the distribution of the first new token, to verify it: two devices can run them side by side. Here they take
    turns.
    """

    def __init__(self, lm: CausalLM, k: int, capacity: int):
        """capacity: most tokens a generation may reach, drafts included."""
        self._lm, self.k = lm, k
        # A round may draft k tokens beyond k that wait.
        self._session = lm.session(1, min(capacity + 2 * k, lm.info.max_position))
        self._tokens: list[int] = []  # committed
        self._waiting: list[int] = []
        # Of the waiting tokens.
        self._distributions: list[Tensor] = []
        # Of committed and waiting tokens.
        self._read = 0
        self._offered = 0

    def start(self, prompt: Sequence[int], features: Tensor, first_token: int) -> None:
        self._session.reset(1)
        self._tokens, self._waiting, self._distributions, self._read = [*prompt, first_token], [], [], 0

    def propose(self, max_drafted: int, sampler: Sampler) -> DraftTree:
        waiting = len(self._waiting)
        # Draft nothing that the end of the answer or of the draft's context would cut off.
        room = self._lm.info.max_position - len(self._tokens) - waiting + 1
        num_new = max(0, min(self.k, max_drafted - waiting, room))
        for _ in range(num_new):
            self._draft_one(sampler)
        self._offered = min(waiting + min(num_new, 1), max_drafted)
        offered = tuple(self._waiting[: self._offered])
        distributions = None if sampler.greedy or not offered else torch.stack(self._distributions[: self._offered])
        chain = chain_parents(self._offered)
        return DraftTree(
            offered, chain, distributions, last_unread=self._offered > 0, num_drafted=num_new, draft_calls=num_new
        )

    def _draft_one(self, sampler: Sampler) -> None:
        # Slices of what is new: a copy of the whole sequence would grow with it.
        unread = self._tokens[self._read :] + self._waiting[max(0, self._read - len(self._tokens)) :]
        logits = self._session.extend([unread]).logits[:, -1]  # [1, V]
        self._read += len(unread)
        with located(model="draft"):
            tokens, distributions = sampler.draw(logits, [0], len(self._waiting))
        self._waiting += tokens
        self._distributions += () if distributions is None else distributions.unbind()

    def advance(self, outcome: Outcome) -> None:
        accepted = outcome.num_accepted
        # All accepted: the rest still waits.
        if self._offered and accepted == len(outcome.emitted):
            self._waiting, self._distributions = self._waiting[accepted:], self._distributions[accepted:]
        else:
            self._waiting, self._distributions = [], []
            self._read = min(self._read, len(self._tokens) + accepted)
            self._session.keep([self._read])
        self._tokens += outcome.emitted


@dataclass(frozen=True)
class PearlMethod(Method):
    """PEARL (Liu et al. 2024): k tokens are drafted beside every target call, which verifies those drafted before."""

    k: int = 5
    uses = ("draft",)
    ranges: ClassVar = {"k": (1, MAX_NODES // 2)}

    def build(self, models: Models, rows: int = 1) -> Drafter | None:
        assert models.draft is not None
        return EachRow([PearlDrafter(models.draft, self.k, models.capacity) for _ in range(rows)])


METHODS = {"pearl": PearlMethod()}

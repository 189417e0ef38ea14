"""The arrays of one answer's rollouts, filled round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from draftsmith.eval.replay.coupling import ReadAnswer, verdict_of
from draftsmith.eval.replay.rollouts import ChainRollouts, Floats
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.repeats import repeat_scores
from draftsmith.modules.decoding.branches import Drafted
from draftsmith.modules.decoding.confidence import TokenConfidences, draft_distribution
from draftsmith.modules.decoding.protocols import DraftView
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.types import SamplingParams

Embed = Callable[[Tensor], Tensor]


class ChainRows:
    """Rounds of one answer, each of at most `depth` kept tokens."""

    def __init__(self, reading: ReadAnswer, depth: int, params: SamplingParams):
        self._reading, self._depth, self._temperature = reading, depth, params.temperature
        self._rounds, self._length = len(reading.answer.tokens) - 1, len(reading.answer.tokens)
        shape = (self._rounds, depth)
        self._token = np.full(shape, -1, np.int64)
        self._num_accepted, self._past_end = np.zeros(self._rounds, np.int64), np.zeros(self._rounds, np.int64)
        names = ("log_q", "log_max_q", "entropy", "accept_prob", "overlap")
        self._floats = {name: np.full(shape, np.nan) for name in names}
        self._was_read = np.zeros(shape, bool)
        # The state before every drafted token: rounds one after the other, of each the first and the last `depth`.
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []

    def add(self, start: int, views: Sequence[DraftView], keep_states: bool) -> None:
        """The round that begins before answer token `start`. The view of a token has read the one before it."""
        row, text = start - 1, self._reading.text
        self._was_read[row, : max(len(views) - 1, 0)] = True
        if keep_states:
            states = [view.hidden for view in views]
            self._before += states[: self._depth]
            self._after += states[1:]
        views = views[: self._depth]
        if not views:
            return
        tokens = [view.token for view in views]
        labelled = self._compare(row, tokens)
        distributions = torch.stack([draft_distribution(view) for view in views])
        own = distributions[torch.arange(len(tokens)), tokens].double()
        self._put(row, "log_q", own.log())
        self._put(row, "log_max_q", distributions.amax(-1).double().log())
        self._put(row, "entropy", -torch.xlogy(distributions, distributions).sum(-1))
        if text.distributions is None:
            same = torch.arange(labelled) < self._num_accepted[row] + self._past_end[row]
            self._put(row, "accept_prob", same)
            self._put(row, "overlap", same)
        else:
            p = text.distributions[start : start + labelled]
            at_token = p[torch.arange(labelled), tokens[:labelled]].double()
            self._put(row, "accept_prob", (at_token / own[:labelled]).clamp_max(1))
            self._put(row, "overlap", torch.minimum(p, distributions[:labelled]).sum(-1))

    def add_all(
        self, drafted: Drafted, known: Mapping[str, Tensor], keep_states: bool, ends: Sequence[int] = ()
    ) -> None:
        """Every round at once. drafted: of one token more than is kept. known: `log_q` and so on, [S, K] float64,
        `accept_prob` and `overlap` wherever the text says something of the token. ends: tokens that drafts end with."""
        tokens = drafted.tokens[:, : self._depth].cpu().numpy()
        is_end = np.isin(tokens, list(ends))
        behind = (is_end.cumsum(1) - is_end) > 0
        tokens = np.where(behind, -1, tokens)
        self._was_read[:] = ~behind & ~is_end
        labelled = np.array([self._compare(row, own) for row, own in enumerate(tokens.tolist())])
        unknown = np.arange(self._depth) >= labelled[:, None]
        for name, values in known.items():
            self._floats[name][:] = values.cpu().numpy()
            if name in ("accept_prob", "overlap"):
                self._floats[name][unknown] = np.nan
            self._floats[name][behind] = np.nan
        if keep_states:
            self._before = list(drafted.hidden[:, :-1][torch.from_numpy(~behind)])
            self._after = list(drafted.hidden[:, 1:][torch.from_numpy(self._was_read)])

    def _compare(self, row: int, tokens: Sequence[int]) -> int:
        """Write a round's tokens, and what the text says of them; how many it says something of."""
        verdict = verdict_of(tokens, self._reading, row + 1)
        self._token[row, : len(tokens)] = tokens
        self._num_accepted[row], self._past_end[row] = verdict.accepted, verdict.past_end
        return verdict.labelled

    def _put(self, row: int, name: str, values: Tensor) -> None:
        self._floats[name][row, : len(values)] = values.double().cpu().numpy()

    def rollouts(self, prompt: Sequence[int], heads: Mapping[str, AcceptanceHead], embed: Embed) -> ChainRollouts:
        """embed: the drafter's token embeddings, for heads that read the state before a token."""
        text = [*prompt, *self._reading.answer.tokens]
        starts = list(range(len(prompt) + 1, len(text)))
        self._floats["repeat"] = repeat_scores(text, starts, torch.from_numpy(self._token)).double().numpy()
        states = {
            "before": (self._token >= 0, torch.stack(self._before) if self._before else None),
            "after": (self._was_read, torch.stack(self._after) if self._after else None),
        }
        logits = {}
        for label, head in heads.items():
            mask, hidden = states[head.config.state]
            logits[label] = np.full(self._token.shape, np.nan)
            if hidden is not None:
                logits[label][mask] = self._head_logits(head, mask, hidden, embed)
        return ChainRollouts(
            answers=[self._reading.answer],
            answer=np.zeros(self._rounds, np.int64),
            start=np.arange(1, self._length),
            token=self._token,
            num_accepted=self._num_accepted,
            **self._floats,
            heads=logits,
            past_end=self._past_end,
        )

    def _head_logits(self, head: AcceptanceHead, mask: np.ndarray, hidden: Tensor, embed: Embed) -> Floats:
        """Raw logits [N] of the N tokens in the mask [S, K], by their states [N, H]: all of an answer in one call."""

        def of_tokens(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values[mask])).to(hidden.device)

        config = head.config
        embeds = embed(of_tokens(self._token)) if config.state == "before" else None
        features = None
        if config.features:
            depth = np.broadcast_to(np.arange(1, self._depth + 1), mask.shape)
            log_q, log_max_q, entropy, repeat = (
                of_tokens(self._floats[key]) for key in ("log_q", "log_max_q", "entropy", "repeat")
            )
            place = of_tokens(depth).double()
            temperature = torch.full_like(place, self._temperature)
            features = head.feature_values(TokenConfidences(log_q, log_max_q, entropy, place, temperature, repeat))
        logits = head(hidden, embeds, features).double().cpu().numpy()
        if not np.isfinite(logits).all():
            raise NonFinite("output", "acceptance", None)
        return logits

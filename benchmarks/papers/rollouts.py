"""Draft from every place of the target's own answers, and read off what any rule that ends drafts would do.

An answer X is there first, and the drafts are drawn to fit: a token that follows the text is X's own x with
probability min(1, q(x)/p(x)), else it is drawn from norm((q - p)+) and rejected. Over X ~ p this is speculative
sampling: the draft is distributed as q, is accepted with min(1, p/q), and X is the target's own token after a
rejection (a maximal coupling; Leviathan et al. 2023, algorithm 1). One uniform number a place decides for every round
that reaches it. Greedily a token is accepted where it is X's. A round that accepts n tokens is followed by the one n
+ 1 places on, so the counts are those of decoding with drafts verified token by token, as in the papers.

S places, all tokens of the answers but their first; K drafted tokens. `modules/along.py` takes the mean over drafts in
place of drawing them, but rules look at what was drafted in vain, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.along import Answer, TargetText, read
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.plain import room_for
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.drafters.branches import BranchDrafter, Draw
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import by_drafter, chain_method
from draftsmith.modules.finite import name_nonfinite
from draftsmith.modules.sampling import TorchSource, best_tokens, draw_rows, probabilities, residual
from draftsmith.modules.targets.base import final_state
from draftsmith.modules.types import SamplingParams

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rollouts:
    """Drafts of K tokens from the S places of one answer, whatever the target accepts.

    num_tokens: of the answer. limit [S]: most tokens of a draft, by decoding's room and up to a drafted end token.
    num_accepted [S]: tokens before the first rejected one, within the answer. q [S, K]: the probability of each
    drafted token, behind rejected ones too. heads: raw logits [S, K] of each acceptance head once the drafter has read
    the token.
    """

    num_tokens: int
    limit: Ints
    num_accepted: Ints
    q: Floats
    heads: Mapping[str, Floats]


class Recorder:
    """Drafter along the target's own answers. Response number i has the seed `seed` + i, as in the bench."""

    def __init__(
        self,
        models: Models,
        drafter: str,
        params: SamplingParams,
        depth: int,
        max_new_tokens: int,
        seed: int,
        heads: Mapping[str, AcceptanceHead],
    ):
        self._models, self._params, self._depth, self._seed = models, params, depth, seed
        self._max_new_tokens, self._heads = max_new_tokens, heads
        self._drafter = BranchDrafter(models.net(drafter), depth)
        reader = models.draft if drafter == "draft" else models.target
        assert reader is not None
        self._longest = min(reader.info.max_position, models.target.info.max_position)

    @torch.inference_mode()
    def __call__(self, prompt: BenchPrompt, number: int) -> Rollouts:
        target, params, depth, begin = self._models.target, self._params, self._depth, len(prompt.prompt_ids)
        with name_nonfinite([prompt.id]):
            source = TorchSource(self._seed + number)
            answer = generate_one(
                target, None, prompt.prompt_ids, params, self._max_new_tokens, source, self._models.ends
            )
            ids = [*prompt.prompt_ids, *answer.tokens]
            room = room_for(prompt.prompt_ids, self._max_new_tokens, target.info)
            span = Answer(begin, len(ids), begin + room)
            text = read(target, ids, [span], params, self._drafter.aux_layers)
            # Near the end of its context the drafter drafts fewer tokens; here it drafts none.
            starts = span.starts[span.starts + depth <= self._longest]
            limit = torch.zeros(len(span.starts), dtype=torch.int64)
            accepted, numbers = limit.clone(), torch.full((1 + len(self._heads), len(limit), depth), torch.nan).double()
            if len(starts):
                text.open(self._drafter, len(ids))
                drafted = self._drafter.grow(starts.tolist(), depth, self._draw(text, starts, number))
                own = drafted.tokens.cpu()
                same = own == torch.tensor([*ids, *[-1] * depth])[starts[:, None] + torch.arange(depth)]
                accepted[: len(own)] = same.cumprod(1).sum(1)
                limit[: len(own)] = self._limits(own).minimum(span.limit - starts - 1).clamp_min(0)
                numbers[:, : len(own)] = self._numbers(starts.tolist(), own, drafted.hidden)
        q, *heads = (values.numpy() for values in numbers)
        logits = dict(zip(self._heads, heads, strict=True))
        return Rollouts(len(answer.tokens), limit.numpy(), accepted.numpy(), q, logits)

    def _draw(self, text: TargetText, starts: Tensor, number: int) -> Draw:
        """Return the coupled draws of drafts from starts [S]."""
        target, params, begin = self._models.target, self._params, text.answers[0].begin
        last = text.states[final_state(target.info.num_layers)]
        decides = torch.rand(len(text.ids), generator=generator(self._seed, number), dtype=torch.float64)
        free = [
            torch.rand(self._depth, generator=generator(self._seed, number, start - begin), dtype=torch.float64)
            for start in starts.tolist()
        ]

        def p_at(places: Tensor) -> Tensor:
            return probabilities(target.lm_head(last[places - 1]), params)

        return coupled(torch.tensor(text.ids), p_at, starts, decides, torch.stack(free), params)

    def _limits(self, drafted: Tensor) -> Tensor:
        """Return the length [S] of drafts [S, K] that a drafted end token ends."""
        ends = torch.isin(drafted, torch.tensor(self._models.ends, dtype=torch.int64))
        return torch.where(ends.any(1), ends.int().argmax(1) + 1, drafted.shape[1])

    def _numbers(self, starts: Sequence[int], drafted: Tensor, hidden: Tensor) -> Tensor:
        """Return q and the logits of each head [1 + heads, S, K] of drafts [S, K]."""
        # Greedily, those at temperature 1.
        params = SamplingParams(1.0) if self._params.greedy else self._params
        probs = probabilities(self._drafter.lm_head(hidden).flatten(0, 1), params)  # [S * K, V]
        q = probs.gather(-1, drafted.flatten()[:, None]).view(drafted.shape)
        states = self._drafter.states(starts, drafted)[:, 1:] if self._heads else hidden
        return torch.stack([q.double(), *(head(states).double() for head in self._heads.values())])


def generator(*numbers: int) -> torch.Generator:
    """Return a generator that is seeded with several numbers."""
    return torch.Generator().manual_seed(zlib.crc32(repr(numbers).encode()))


def coupled(
    ids: Tensor,
    p_at: Callable[[Tensor], Tensor],
    starts: Tensor,
    decides: Tensor,
    free: Tensor,
    params: SamplingParams,
) -> Draw:
    """Return the draws of drafts from starts [S] that are coupled with a text of ids [T].

    p_at: distributions [s, V] of the target at places [s] of the text. decides: [T] uniforms, by which all drafts
    follow the text there or not. free: [S, K] uniforms of tokens that do not.
    """
    follows = torch.ones(len(starts), dtype=torch.bool)

    def draw(piece: slice, level: int, logits: Tensor) -> Tensor:
        if params.greedy:
            return best_tokens(logits)
        q, at = probabilities(logits, params), starts[piece] + level
        on_text, at = follows[piece] & (at < len(ids)), at.clamp_max(len(ids) - 1)
        p, own = p_at(at), ids[at]
        # Uniform < q/p: the draft is the text's token. p(x) min(1, q/p) = min(p, q) = q(x) min(1, p/q).
        q_own, p_own = (probs.gather(1, own[:, None])[:, 0].double() for probs in (q, p))
        kept = on_text & (decides[at] * p_own < q_own)
        follows[piece] &= kept
        drawn = draw_rows(torch.where(on_text[:, None], residual(q, p), q), free[piece, level])
        return torch.where(kept, own, drawn)

    return draw


# -- rules that end a draft

RuleName = Literal["k", "t", "h", "oracle"]
RAW = ", raw"  # suffix of a head's name: its output without calibration


@dataclass(frozen=True)
class Policy:
    """One setting of a stop policy.

    value: K, t or h of the rule. predictor: name of the probabilities that the rule h reads. minimum, maximum: shortest
    and longest draft.
    """

    rule: RuleName
    value: float = 0.0
    predictor: str = ""
    minimum: int = 1
    maximum: int = 0

    @property
    def label(self) -> str:
        """Short text of the setting for tables."""
        if self.rule == "k":
            return f"K={self.value:g}"
        value = f"{self.rule}={self.value:g}, " if self.rule in "th" else ""
        return f"{value}max {self.maximum}" if self.maximum else self.rule

    @property
    def head(self) -> str:
        """Name of the head whose probabilities it reads."""
        return self.predictor.removesuffix(RAW)

    def method(self, drafter: str) -> str | None:
        """Return the method of `eval bench` (a head is passed beside it), or None if no decoder can run it."""
        by = by_drafter(drafter)
        limits = f"min={self.minimum}:max={self.maximum}{by}"
        if self.rule == "k":
            return f"{chain_method(drafter)}:k={self.value:g}"
        if self.rule == "t":
            return f"confidence:t={self.value:g}:{limits}"
        if self.rule == "oracle":
            return None
        return f"specdec++:h={self.value:g}:{limits}{'' if self.predictor.endswith(RAW) else ':calibrated=on'}"


def lengths(policy: Policy, rollouts: Rollouts, heads: Mapping[str, AcceptanceHead]) -> Ints:
    """Return how many tokens [S] the policy drafts from each place, room and end tokens left aside."""
    if policy.rule == "k":
        return np.full(len(rollouts.limit), int(policy.value), np.int64)
    if policy.rule == "oracle":
        # SpecDec++, lemma 2.1: a draft ends before the token that will be rejected, and leaves the last to the target.
        left = rollouts.num_tokens - 1 - np.arange(1, len(rollouts.limit) + 1)
        return np.minimum(rollouts.num_accepted, left)
    if policy.rule == "t":
        stops = rollouts.q < policy.value
    else:
        head, raw = heads[policy.head], torch.from_numpy(rollouts.heads[policy.head])
        calibrated = raw if policy.predictor.endswith(RAW) else head.calibrated(raw)
        survival = torch.sigmoid(calibrated).numpy().cumprod(1)
        # The probability of a token is known one token later.
        late = np.concatenate([np.ones_like(survival[:, :1]), survival[:, :-1]], 1)
        stops = ~(1 - late <= policy.value)
    stops = stops[:, policy.minimum - 1 : policy.maximum].copy()
    stops[:, -1] = True
    return stops.argmax(1) + policy.minimum


def decoded(policy: Policy, rollouts: Rollouts, heads: Mapping[str, AcceptanceHead]) -> DecodeTrace:
    """Return the rounds of the answer under a policy, as `generate` counts them."""
    drafts = np.minimum(lengths(policy, rollouts, heads), rollouts.limit).tolist()
    trace, emitted = DecodeTrace(prefill_emitted=1), 1
    while emitted < rollouts.num_tokens:
        drafted = drafts[emitted - 1]
        accepted = min(drafted, int(rollouts.num_accepted[emitted - 1]))
        count = min(accepted + 1, rollouts.num_tokens - emitted)
        trace.steps.append(DecodeStep(drafted, accepted, count, drafted))
        emitted += count
    return trace

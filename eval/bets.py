"""Sampling test: whether the emitted tokens follow the target's own distribution, by bets at the target's odds.

Every bet starts with a stake of 1. Every emitted token y multiplies it by 1 + l x(y), where l and x are fixed before y
is known and x has mean 0 under the target's distribution p. Under p the mean of all stakes stays 1 on average, so it
reaches M with probability at most 1 / M, for any number of tokens and whenever one stops (Ville's inequality; test
martingales, Shafer et al. 2011). Nothing is approximated. If tokens do not follow p, the stakes of bets in the right
direction grow exponentially; having many bets costs the logarithm of their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.data.engines.served_target import ServedLM
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

# Strengths l of bets on a score, and on single tokens, both with both signs.
STRENGTHS = (0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 0.95)
TOKEN_STRENGTHS = (0.03, 0.1, 0.3, 0.95)
LOWEST = 8.0  # nats below the best token at which the score of probable tokens reaches 0
SCORES = (
    "what was drafted",
    "the draft's first choice",
    "tokens drafted more often than they are the target's",
    "probable tokens",
    "high token ids, drafted",
    "high token ids, the target's own",
)
SHIFTS = SCORES[:4]  # whose smallest detectable shift is reported
POWER_SIGMAS = 1.28  # of a normal variable, exceeded with probability 0.9 from below
TOKENS = "single tokens"
CELLS = 2**21  # entries of [N, V] that are tested at once
# A probability whose square, what log(1 - l p) differs by from -l p, does not count in a sum over all tokens.
NEGLIGIBLE = 1e-7
MAX_GAP = 0.5  # of an answer's logits to the best ones, in bfloat16 and float16
# A token of probability 0 may still be possible: a logit, or the mass kept by top-p, that differs by rounding would
# keep it.
TIED_LOGIT = {torch.float32: 1e-3, torch.float64: 1e-6}
TIED_MASS = 1e-4
TAIL = 1e-6  # least mass of unknown tokens: that of the known ones is a sum of rounded numbers


def ends_as_asked(tokens: Sequence[int], ends: Sequence[int], max_tokens: int) -> bool:
    """Check that an answer ends with its first end token or at its length limit."""
    if not tokens or any(token in ends for token in tokens[:-1]):
        return False
    return len(tokens) == max_tokens or (len(tokens) < max_tokens and tokens[-1] in ends)


@dataclass(frozen=True)
class DecidedTokens:
    """N emitted tokens and everything that was known when each was decided.

    Given these, a token of a lossless method still follows the target: a drafter's distribution depends only on what
    came before, a stop policy keeps the token that it looked at, and of a block only what was accepted so far is known.

    Attributes:
        token: [N] int64.
        target: [N, V] float64, the target's distribution.
        draft: [N, V], the distribution that a draft, or a tree node's first child, was sampled from; 0 where none was.
        children: [N, V] bool, tokens drafted as children of a tree node, without sampling; beside a distribution, its
            likeliest token, which may have been drafted in place of a drawn one.
    """

    token: Tensor
    target: Tensor
    draft: Tensor
    children: Tensor

    def take(self, rows: slice | Tensor) -> DecidedTokens:
        """Return some of the tokens, by index or mask."""
        return DecidedTokens(*(column[rows] for column in vars(self).values()))

    def parts(self) -> Iterator[DecidedTokens]:
        """Yield the tokens in parts of at most CELLS entries of [N, V]."""
        rows = max(1, CELLS // self.target.shape[1])
        for start in range(0, len(self.token), rows):
            yield self.take(slice(start, start + rows))


def answer_logits(
    lm: CausalLM, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams
) -> tuple[Tensor, Tensor | None]:
    """Return logits [N, V] at the places of an answer's tokens; by a server, log-probabilities, and which of them are
    known (`ServedLM.log_probs`)."""
    if isinstance(lm, ServedLM):
        return lm.log_probs([*prompt, *answer], len(prompt), params)
    ids = torch.tensor([[*prompt, *answer]], device=lm.device)
    return lm.lm_head(lm.features(ids)[0, len(prompt) - 1 : -1]), None


@torch.inference_mode()
def decided_tokens(
    lm: CausalLM,
    prompt: Sequence[int],
    answer: Sequence[int],
    params: SamplingParams,
    max_gap: float,
    drafted: tuple[Tensor, Tensor] | None = None,
) -> tuple[DecidedTokens, int]:
    """Read an answer's tokens under the target in one forward; return them and the number of impossible ones.

    Tokens of probability 0 are impossible unless rounding explains them, and are left out. drafted: `draft` and
    `children` of them.
    """
    logits, known = answer_logits(lm, prompt, answer, params)
    target, token = probabilities(logits, params).double(), torch.tensor(answer, device=lm.device)
    draft, children = drafted or (torch.zeros_like(target), torch.zeros_like(target, dtype=torch.bool))
    tokens = DecidedTokens(token, target, draft, children)
    if known is not None and not params.top_k and not bool(known.all()):
        return with_tail(tokens, logits, known), 0

    emittable = target.gather(1, token[:, None])[:, 0] > 0  # [N]
    if bool(emittable.all()):
        return tokens, 0
    # A slightly larger logit, or top_p, would keep the token.
    wider = SamplingParams(params.temperature, params.top_k, min(1.0, params.top_p + TIED_MASS))
    tied = TIED_LOGIT.get(lm.dtype, max_gap) if known is None else max_gap
    raised = logits.float() + tied * F.one_hot(token, logits.shape[1])
    possible = probabilities(raised, wider).gather(1, token[:, None])[:, 0] > 0
    return tokens.take(emittable), int((~possible & ~emittable).sum())


def with_tail(tokens: DecidedTokens, logits: Tensor, known: Tensor) -> DecidedTokens:
    """Let one token of each place stand for all whose probability is unknown, with their mass.

    Which one depends on what was known before the token was decided, so that the test stays exact. logits [N, V]:
    log-probabilities. known [N, V]: of which tokens.
    """
    tail = (~known).float().argmax(-1, keepdim=True)  # [N, 1]
    target = torch.where(known, logits.exp(), 0)
    target = target.scatter(1, tail, (1 - target.sum(-1, keepdim=True)).clamp_min(TAIL))
    rest = torch.where(known, 0, tokens.draft).sum(-1, keepdim=True)
    drafted = (tokens.children & ~known).any(-1, keepdim=True)

    is_known = known.gather(1, tokens.token[:, None])[:, 0]
    return DecidedTokens(
        token=torch.where(is_known, tokens.token, tail[:, 0]),
        target=target / target.sum(-1, keepdim=True),
        draft=torch.where(known, tokens.draft, 0).scatter(1, tail, rest),
        children=(tokens.children & known).scatter(1, tail, drafted),
    )


class Evidence:
    """Logarithms of all stakes, by family of bets.

    drift: by score, how far below and above 0 its mean may lie without paying.
    """

    def __init__(self, drift: Mapping[str, tuple[float, float]] | None = None) -> None:
        self.drift = drift or {}
        self.stakes: dict[str, Tensor] = {}
        self.moments = Drift()
        self.impossible = 0  # tokens that the target cannot emit

    def add(self, tokens: DecidedTokens) -> None:
        """Bet on more tokens."""
        p, emitted = tokens.target, tokens.token[:, None]

        def add_logs(name: str, logs: Tensor) -> None:
            self.stakes[name] = self.stakes[name] + logs.cpu() if name in self.stakes else logs.cpu()

        gains = score_gains(tokens)
        self.moments.add(gains)
        for name, x in gains.items():
            low, high = self.drift.get(name, (0.0, 0.0))
            up, down = log_factors(STRENGTHS, x - high), log_factors([-strength for strength in STRENGTHS], x - low)
            add_logs(name, torch.cat([up, down]))

        # Bets on each token of the vocabulary: x is 1 at the token minus its probability.
        p_emitted = p.gather(1, emitted)[:, 0]  # [N]
        mass, likely = p.sum(0), (p > NEGLIGIBLE).nonzero(as_tuple=True)  # [V]; rows and ids of E entries
        p_likely, token_logs = p[likely], []
        for strength in (*TOKEN_STRENGTHS, *(-strength for strength in TOKEN_STRENGTHS)):
            hits = torch.log1p(strength * (1 - p_emitted)) - torch.log1p(-strength * p_emitted)
            # The sum of log(1 - l p) over tokens: -l p, and what the curve adds where p is not negligible.
            curve = torch.log1p(-strength * p_likely) + strength * p_likely
            token_logs.append((-strength * mass).index_add(0, likely[1], curve).index_add(0, tokens.token, hits))
        add_logs(TOKENS, torch.stack(token_logs))

    @property
    def p_value(self) -> float:
        """Upper bound of the probability of such evidence against a lossless method.

        It is one over the mean stake; families count alike, and so do the bets of one.
        """
        if self.impossible or not self.stakes:
            return 0.0 if self.impossible else 1.0
        means = [stakes.flatten().logsumexp(0) - math.log(stakes.numel()) for stakes in self.stakes.values()]
        return math.exp(min(0.0, math.log(len(means)) - float(torch.stack(means).logsumexp(0))))

    def detectable(self, level: float) -> dict[str, float]:
        """Return by score the shift of its mean that bets on so many tokens find with probability 0.9.

        The logarithm of a stake on a shift d of gains with variance v grows by d^2 / 2v a token, give or take d /
        sqrt(v) times the root of their number; it must exceed that of the number of bets over the level.
        """
        log = math.log(2 * len(STRENGTHS) * (len(SCORES) + 1) / level)
        sigmas, count = POWER_SIGMAS + math.sqrt(POWER_SIGMAS**2 + 2 * log), self.moments.count
        return {
            name: sigmas * math.sqrt(square / count / count) + self.drift.get(name, (0.0, 0.0))[1]
            for name, square in self.moments.squares.items()
            if square and name in SHIFTS
        }

    @property
    def strongest(self) -> str:
        """Describe the bet that won most."""
        if not self.stakes:
            return ""
        name, stakes = max(self.stakes.items(), key=lambda item: float(item[1].max()))
        if name == TOKENS:
            strength, token = divmod(int(stakes.argmax()), stakes.shape[1])
            return f"token {token} comes too {'often' if strength < len(TOKEN_STRENGTHS) else 'seldom'}"
        return f"{'towards' if int(stakes.argmax()) < len(STRENGTHS) else 'away from'} {name}"


def score_gains(tokens: DecidedTokens) -> dict[str, Tensor]:
    """Return what each score gains at each token, [N]: a score in [0, 1] minus its mean under the target.

    A score is 0 where it says nothing about a token.
    """
    p, q, children = tokens.target, tokens.draft, tokens.children
    p_emitted, q_emitted, chosen = (values.gather(1, tokens.token[:, None])[:, 0] for values in (p, q, children))
    sampled = q.sum(-1) > 0  # [N]: a sampled draft was verified here
    verified = sampled | children.any(-1)
    of_children = chosen.to(p.dtype) - (p * children).sum(-1)
    ratio = torch.where(p_emitted > 0, q_emitted / p_emitted, 0).clamp_max(1)
    more_often = (q_emitted > p_emitted).to(p.dtype) - (p * (q > p)).sum(-1)
    best = p.amax(-1, keepdim=True)
    probable = (1 + (p / best).log() / LOWEST).clamp_min(0)
    # The probability of smaller ids and half that of its own, whose mean is half of everything.
    order = (p.cumsum(-1) - p / 2).gather(1, tokens.token[:, None])[:, 0] - p.sum(-1).square() / 2
    gains = (
        torch.where(sampled, ratio - torch.minimum(p, q).sum(-1), of_children),
        of_children * sampled,
        more_often * sampled,
        probable.gather(1, tokens.token[:, None])[:, 0] - (p * probable).sum(-1),
        order * verified,
        order * ~verified,
    )
    return dict(zip(SCORES, gains, strict=True))


class Drift:
    """Moments of what each score gains on a server's tokens: how far its mean lies from the target's.

    count: tokens. sums, squares: by score.
    """

    def __init__(self) -> None:
        self.count, self.sums, self.squares = 0, dict.fromkeys(SCORES, 0.0), dict.fromkeys(SCORES, 0.0)

    def add(self, gains: Mapping[str, Tensor]) -> None:
        """Take in what each score gained at more tokens."""
        self.count += len(gains[SCORES[0]])
        for name, x in gains.items():
            self.sums[name] += float(x.sum())
            self.squares[name] += float(x.square().sum())

    @property
    def means(self) -> dict[str, float]:
        """Return the mean gain of each score."""
        return {name: total / max(1, self.count) for name, total in self.sums.items()}

    def bounds(self, level: float) -> dict[str, tuple[float, float]]:
        """Return for each score how far its mean may lie below and above 0: a confidence interval, and 0.

        Empirical Bernstein (Maurer & Pontil 2009, theorem 4), of gains between -1 and 1; all intervals hold with
        probability 1 - level.
        """
        count, found = self.count, {}
        log = math.log(4 * len(SCORES) / level)
        for name in SCORES:
            mean = self.means[name]
            variance = max(0.0, self.squares[name] / count - mean**2) * count / max(1, count - 1)
            # A score that never says anything has no drift.
            width = math.sqrt(2 * variance * log / count) + 14 * log / (3 * max(1, count - 1)) if variance else 0.0
            found[name] = min(0.0, mean - width), max(0.0, mean + width)
        return found


def log_factors(strengths: Sequence[float], x: Tensor) -> Tensor:
    """Return the sum of log(1 + l x) over tokens for every strength l: x [N] -> [L]."""
    strength = torch.tensor(strengths, dtype=x.dtype, device=x.device)
    return torch.log1p(strength[:, None] * x).sum(1)

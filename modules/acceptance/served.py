"""P(accept) for servers that verify only the likeliest of the tokens that they drafted: many requests at a time, in
plain torch, without a word between device and host.

What it looks at stood there before the token was drawn: the draft's logits, and what followed in the text when its last
tokens last stood in it. A server may therefore drop the token itself; one that looks at what was drawn would change the
output (docs/acceptance.md, "Before the draw").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.acceptance.repeats import Repeats, RepeatScores, mean_score
from draftsmith.modules.decoding.protocols import DraftView

SIZES = tuple(sorted(Repeats.SIZES))
WIDEST = SIZES[-1]
NUM_FEATURES = 2
MAX_LOGIT = 40.0
# How surely the start is believed, at least, as `OnlineLogistic` has it; and, of a fit, that places are alike.
PRIOR, RIDGE = 1.0, 10.0
WORTH = 500.0  # tokens that priors count as
_MIX = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio's, as a signed number


@dataclass(frozen=True)
class Start:
    """What is believed before the first verdict.

    weights: [F] of the log-odds of max q, and of the mean repetition. intercepts: one a place of the draft.
    information: how surely, [K, F+1, F+1], sums of p (1 - p) z z^T over as many tokens as it is worth, with
        z = (features, 1).
    """

    weights: tuple[float, ...]
    intercepts: tuple[float, ...]
    information: tuple[tuple[tuple[float, ...], ...], ...]

    def tensors(self, num_places: int) -> tuple[Tensor, Tensor, Tensor]:
        """For drafts of another length: places behind the last are like it, though nothing is known of them."""
        known = len(self.intercepts)
        information = torch.zeros(num_places, NUM_FEATURES + 1, NUM_FEATURES + 1)
        information[:known] = torch.tensor(self.information)[:num_places]
        intercepts = [self.intercepts[min(place, known - 1)] for place in range(num_places)]
        return torch.tensor(self.weights), torch.tensor(intercepts), information


# As vLLM 0.33 begins, which has fitted several models' drafts.
COLD = Start((0.5, 0.5), (-0.2,), (((0.0,) * 3,) * 3,))


class TextIndex:
    """Where the last tokens of growing texts last stood in them: `Repeats` for many texts, on their device.

    A suffix falls into one of `num_buckets`; of several in one bucket the last is found. What is found is compared with
    the text, so that nothing false is.
    """

    def __init__(self, num_texts: int, device: torch.device, num_buckets: int = 8192):
        assert num_buckets & (num_buckets - 1) == 0
        self._mask = num_buckets - 1
        # Of the token that followed; 0 is none, as no text begins with a repetition.
        self._places = torch.zeros(num_texts, len(SIZES), num_buckets, dtype=torch.int32, device=device)
        offsets = torch.arange(WIDEST)
        self._sizes = torch.tensor(SIZES, device=device)
        self._within = offsets.to(device) >= WIDEST - self._sizes[:, None]  # [sizes, WIDEST]
        powers = torch.tensor([pow(_MIX, n + 1, 2**64) - 2**63 | 1 for n in range(WIDEST)], device=device)
        self._factors = torch.where(self._within, powers, 0)
        self._back = offsets.to(device) - WIDEST

    def clear(self, text: int) -> None:
        """Another one begins there."""
        self._places[text].zero_()

    def add(self, texts: Tensor, rows: Tensor, places: Tensor, valid: Tensor) -> None:
        """Tokens of texts [.., T] of these rows [N] and places [N, M], where valid [N, M], and what stands before."""
        last = (places[..., None] + self._back).clamp_(0, texts.shape[1] - 1)
        windows = texts[rows[:, None, None], last].long()
        kept = valid[..., None] & (places[..., None] >= self._sizes)
        flat = self._flat(rows[:, None], windows).flatten()
        found = torch.where(kept, places[..., None], 0).to(torch.int32).flatten()
        self._places.view(-1).scatter_reduce_(0, flat, found, "amax")

    def follower(self, texts: Tensor, rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """`Repeats.follower` of the last tokens before [N, WIDEST] (-1 in front of a shorter text): float32 and int64
        [N]; the token is 0 where there is none."""
        places = self._places.view(-1)[self._flat(rows, before)].long()  # [N, sizes]
        stood = texts[rows[:, None, None], (places[..., None] + self._back).clamp_min(0)]
        same = ((stood == before[:, None]) | ~self._within).all(-1) & (places > 0)
        longest = same.long().cumprod(-1).sum(-1)
        at = places.gather(1, (longest - 1).clamp_min(0)[:, None])
        half = torch.where(longest > 0, self._sizes[(longest - 1).clamp_min(0)] / 2, 0.0)
        return half, texts[rows, at[:, 0]].long()

    def _flat(self, rows: Tensor, windows: Tensor) -> Tensor:
        """Where a suffix of every size [.., sizes] of windows [.., WIDEST] belongs."""
        mixed = (windows[..., None, :] * self._factors).sum(-1) * _MIX
        bucket = (mixed >> 40) & self._mask
        sizes = torch.arange(len(SIZES), device=windows.device)
        return (rows[..., None] * len(SIZES) + sizes) * (self._mask + 1) + bucket


@dataclass(frozen=True)
class ServedTexts:
    """The server's own state, which it changes as it goes on.

    tokens [R, T], lengths [R]: of every request's text so far. drafted [R, K]: this round's, in the batch's order.
    greedy_drafts: the server drafts the mode at any temperature. requests: ids by place; num_read: their texts' lengths
    when they came, on the host.
    """

    tokens: Tensor
    lengths: Tensor
    drafted: Tensor
    greedy_drafts: bool
    requests: Mapping[int, str]
    num_read: Any


class ServedEstimator:
    """A logistic of the log-odds of max q and of the mean repetition, with an intercept for every place of a draft,
    learned from all requests' verdicts by an online Newton method, as `OnlineLogistic` is.

    A server calls `predict` after each draft step and `step` after every verification, before the next draft. Both may
    be asked of requests in any order; one of index -1 is none.

    memory: tokens after which what verdicts said counts 1 / e. start: what is believed before them.
    """

    def __init__(
        self, max_num_reqs: int, num_speculative_steps: int, device: torch.device, start: Start = COLD,
        memory: float = 20_000.0, repeats: bool = True,
    ):  # fmt: skip
        size = max_num_reqs + 1, num_speculative_steps  # the last is of no request
        self._nobody, self._memory = max_num_reqs, memory
        self._served: ServedTexts | None = None
        self.weights, self.intercepts, self.information = (
            tensor.to(device) for tensor in start.tensors(num_speculative_steps)
        )
        self.features = torch.zeros(*size, NUM_FEATURES + 1, device=device)
        self.features[..., -1] = 1.0
        self.predictions = torch.zeros(size, device=device)
        self._steps = torch.arange(num_speculative_steps, device=device)
        self._index = TextIndex(max_num_reqs + 1, device) if repeats else None
        self._num_read = torch.zeros(max_num_reqs + 1, dtype=torch.int64, device=device)
        self._known = dict[int, str]()

    def attach(self, served: ServedTexts) -> None:
        """The texts to look for repetitions in; until then there are none."""
        self._served = served

    @torch.no_grad()
    def step(self, idx_mapping: Tensor, num_sampled: Tensor, num_rejected: Tensor) -> None:
        """Verdicts on the last drafts of the requests [N]: how many tokens each has now that it had not, the target's
        own among them, and how many drafted ones were verified and rejected."""
        rows = torch.where(idx_mapping < 0, self._nobody, idx_mapping).long()
        accepted = (num_sampled.long() - 1).clamp_min(0)[:, None]
        verified = accepted + num_rejected.long()[:, None]
        labelled = (self._steps <= accepted) & (self._steps < verified) & (rows != self._nobody)[:, None]
        z, prob = self.features[rows], self.predictions[rows]
        residual = torch.where(labelled, (self._steps < accepted).float() - prob, 0.0)
        weight = torch.where(labelled, prob * (1 - prob), 0.0)
        self.information *= torch.exp(-labelled.sum() / self._memory)
        self.information += torch.einsum("nk,nki,nkj->kij", weight, z, z)
        weights, intercepts = newton_step(self.information, torch.einsum("nk,nki->ki", residual, z), PRIOR)
        self.weights += weights
        self.intercepts += intercepts
        if self._served is not None and self._index is not None:
            self._read(self._served, self._index, rows)

    def _read(self, served: ServedTexts, index: TextIndex, rows: Tensor) -> None:
        """New requests' texts, and what the others have more since."""
        for row, request in list(served.requests.items()):
            if self._known.get(row) != request:
                self._known[row] = request
                index.clear(row)
                count = int(served.num_read[row])
                places = torch.arange(count, device=rows.device)[None]
                index.add(served.tokens, torch.full((1,), row, device=rows.device), places, places >= 0)
                self._num_read[row] = count
        inside = rows.clamp_max(self._nobody - 1)  # the server has no row of nobody
        length = served.lengths[inside].long()
        places = self._num_read[rows][:, None] + torch.arange(len(self._steps) + 1, device=rows.device)
        index.add(served.tokens, inside, places, (places < length[:, None]) & (rows != self._nobody)[:, None])
        self._num_read[rows] = length

    @torch.no_grad()
    def predict(
        self, logits: Tensor, idx_mapping: Tensor, draft_step: Tensor, confidence_probs: Tensor, temperature: Tensor
    ) -> None:
        """P(accept) of the tokens that these logits [N, V] draw, before temperature, into confidence_probs [R, K], in
        the batch's order. draft_step: the place, from 0, of all of them, or of each [N], request by request, of a
        server that drafts all places at once. temperature: [R]."""
        rows = torch.where(idx_mapping < 0, self._nobody, idx_mapping).long()
        inside = rows.clamp_max(self._nobody - 1)
        degrees = temperature[inside].float()
        scaled = logits.float() / torch.where(degrees > 0, degrees, 1.0)[:, None]
        most, mode = scaled.max(-1)
        rest = scaled.scatter(1, mode[:, None], -torch.inf).logsumexp(-1)
        odds = (most - rest).clamp(-MAX_LOGIT, MAX_LOGIT)
        steps = draft_step.long().expand(len(rows))
        batch = torch.arange(len(rows), device=rows.device)
        if draft_step.dim():
            batch = batch // len(self._steps)
        self.features[rows, steps, 0] = odds
        if self._served is not None and self._index is not None and not draft_step.dim():
            half, expected = self._follower(self._served, self._index, inside, steps)
            own = scaled.gather(1, expected.clamp_max(scaled.shape[1] - 1)[:, None])[:, 0]
            drawn = (own - torch.logaddexp(most, rest)).exp()
            drawn = torch.where((degrees > 0) & (not self._served.greedy_drafts), drawn, (mode == expected).float())
            self.features[rows, steps, 1] = mean_score(half, drawn)
        prob = ((self.features[rows, steps, :-1] * self.weights).sum(-1) + self.intercepts[steps]).sigmoid()
        self.predictions[rows, steps] = prob
        confidence_probs[batch, steps] = prob

    def _follower(self, served: ServedTexts, index: TextIndex, rows: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """What follows the texts and the tokens drafted before this step."""
        length = served.lengths[rows].long()
        places = (length + steps)[:, None] + torch.arange(-WIDEST, 0, device=rows.device)
        texts = served.tokens[rows[:, None], places.clamp(0, served.tokens.shape[1] - 1)].long()
        ahead = (places - length[:, None]).clamp(0, served.drafted.shape[1] - 1)
        drafts = served.drafted[: len(rows)].gather(1, ahead).long()
        before = torch.where(places < length[:, None], texts, drafts)
        return index.follower(served.tokens, rows, torch.where(places < 0, -1, before))


def newton_step(information: Tensor, gradient: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Newton's step of weights [F] that all places share and of intercepts [K], by sums a place: p (1 - p) z z^T
    [K, F+1, F+1] and (y - p) z [K, F+1], z = (features, 1). The system is an arrowhead's; F is 2. Zero where it has no
    solution."""
    corner, cross, own = information[:, :-1, :-1].sum(0), information[:, :-1, -1], information[:, -1, -1] + ridge
    shared = gradient[:, :-1].sum(0) - (cross * (gradient[:, -1] / own)[:, None]).sum(0)
    left = corner - (cross.T / own) @ cross
    a, b, d = left[0, 0] + ridge, left[0, 1], left[1, 1] + ridge
    weights = torch.stack([d * shared[0] - b * shared[1], a * shared[1] - b * shared[0]]) / (a * d - b * b)
    weights = weights.nan_to_num(0.0, 0.0, 0.0)
    intercepts = (gradient[:, -1] - cross @ weights) / own
    return weights, intercepts.nan_to_num(0.0, 0.0, 0.0)


def undrawn_features(view: DraftView, repeats: RepeatScores) -> list[float]:
    """What `ServedEstimator` looks at, [F], of a drafted token that a stop policy is shown. repeats: that were shown
    the draft's tokens before it."""
    scaled = view.logits.float() / (view.temperature or 1.0)
    most, mode = scaled.max(-1)
    rest = scaled.index_fill(0, mode, -torch.inf).logsumexp(-1)
    odds = (most - rest).clamp(-MAX_LOGIT, MAX_LOGIT)
    return [odds.item(), repeats.mean(view) if view.temperature else repeats.score(view)]


def fit_priors(features: Tensor, accepted: Tensor, verified: Tensor) -> Start:
    """Priors by verdicts on drafts. features: [N, K, F]. accepted, verified: [N] tokens of each."""
    steps = torch.arange(features.shape[1])
    accepted, verified = accepted[:, None], verified[:, None]
    weight = ((steps <= accepted) & (steps < verified)).double()
    return fit_start(features, (steps < accepted).double(), weight, WORTH)


def fit_start(features: Tensor, accepted: Tensor, weight: Tensor, worth: float) -> Start:
    """What tokens verified elsewhere say, worth so many tokens here.

    features: [N, K, F]. accepted: [N, K] labels in [0, 1]. weight: [N, K], 0 for tokens that were never verified.
    """
    z = torch.cat([features, torch.ones_like(features[..., :1])], -1).double()
    weights, intercepts = torch.zeros(NUM_FEATURES).double(), torch.zeros(features.shape[1]).double()
    information = torch.zeros(())
    for _ in range(30):
        prob = (z[..., :-1] @ weights + intercepts).sigmoid()
        information = torch.einsum("nk,nki,nkj->kij", weight * prob * (1 - prob), z, z)
        gradient = torch.einsum("nk,nki->ki", weight * (accepted - prob), z)
        gradient[:, -1] -= RIDGE * (intercepts - intercepts.mean())
        step = newton_step(information, gradient, RIDGE)
        size = max(float(part.abs().max()) for part in step)
        weights, intercepts = weights + step[0] / max(size, 1.0), intercepts + step[1] / max(size, 1.0)
    information *= worth / float(weight.sum())
    return Start(tuple(weights.tolist()), tuple(intercepts.tolist()), _tuples(information.tolist()))


def _tuples(rows: Sequence[Any]) -> Any:
    return tuple(_tuples(row) if isinstance(row, list) else row for row in rows)

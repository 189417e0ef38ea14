"""Logits to distributions, and draws from them: the only place where temperature, top-k and top-p live."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.transfer import to_device
from draftsmith.modules.types import SamplingParams

# Temperatures that float32 holds the reciprocal of. Below the first one nothing but ties can share the mass, above the
# second nothing but tokens of logit -inf has less of it than others.
COLDEST, HOTTEST = 1e-30, 1e30
# From here down logits divided by the temperature could overflow: the largest becomes 0 first.
COLD = 1e-3
# Vocabularies from this size on are searched in blocks of (at most) this size.
TOP_MIN_SIZE, TOP_BLOCK = 8192, 128


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The next-token distribution [..., V] of logits [..., V], in float32 or wider (a bf16 softmax is off by 7e-4).

    Order as in transformers: temperature, then top-k, then top-p on what is left, then renormalised. Greedy is all mass
    on the argmax, the lowest index on ties. Tokens of equal logit at the top-k boundary are all kept. A row with a NaN,
    with +inf or of nothing but -inf has no distribution: NaN is in it, and nothing can be drawn from it.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if params.greedy:
        best, index = wide.max(-1, keepdim=True)
        return torch.zeros_like(wide).scatter_(-1, index, best - best + 1)
    scaled = wide if params.temperature == 1 else _at_temperature(wide, params.temperature)
    if 0 < params.top_k < scaled.shape[-1]:
        smallest = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    if params.top_p < 1:
        scaled = scaled.masked_fill(~_nucleus(scaled, params.top_p), -torch.inf)
    return scaled.softmax(-1)


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits [..., V] by the temperature, but for a constant a row; finite ones stay so, whatever the temperature."""
    if temperature < COLD:
        logits = logits - logits.amax(-1, keepdim=True)
    return logits / min(max(temperature, COLDEST), HOTTEST)


def row_probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`probabilities` of logits [N, V] where every row has settings of its own."""
    if len(set(params)) == 1:
        return probabilities(logits, params[0])
    distributions = logits.new_empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32))
    for same in dict.fromkeys(params):
        rows = torch.tensor([i for i, own in enumerate(params) if own == same], device=logits.device)
        distributions[rows] = probabilities(logits[rows], same)
    return distributions


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """True on the smallest set of most probable tokens whose mass reaches `top_p`; never empty."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    prob = ordered.softmax(-1)
    mass_before = prob.cumsum(-1, dtype=torch.float64) - prob
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, mass_before < top_p)


def best_token(logits: Tensor) -> int:
    """The argmax of logits [V]; of equal ones the lowest index.

    NumPy's argmax is vectorised on a CPU and torch's is not, which a draft step over a large vocabulary would feel.

    Raises:
        NonFinite: the best logit is none; of a NaN both argmax give the place.
    """
    if logits.is_cuda:
        token = int(best_tokens(logits))
    else:
        wide = (logits if logits.dtype in (torch.float32, torch.float64) else logits.float()).numpy()
        token = int(wide.argmax())
        if not math.isfinite(wide.item(token)):
            token = NO_TOKEN
    if token == NO_TOKEN:
        raise NonFinite
    return token


def best_tokens(logits: Tensor) -> Tensor:
    """`best_token` of rows, logits [..., V] -> int64 [...], without waiting for a device: NO_TOKEN where the best logit
    is none."""
    best, index = logits.max(-1)
    return torch.where(best.isfinite(), index, NO_TOKEN)


def top_values(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their indices, both [n, count], largest first; rows [n, V].

    On a CPU the maxima of blocks, which are quick to get, say in which blocks they are.
    """
    num_rows, size = rows.shape
    block = math.gcd(size, TOP_BLOCK)
    if rows.is_cuda or size < TOP_MIN_SIZE or block < TOP_BLOCK // 4 or count > size // block:
        best = rows.topk(count, dim=-1)
        return best.values, best.indices
    blocks = rows.view(num_rows, -1, block)
    chosen = blocks.amax(-1).topk(count, dim=-1, sorted=False).indices
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, block)).view(num_rows, -1)
    values, places = inside.topk(count, dim=-1)
    return values, chosen.gather(1, places // block) * block + places % block


def residual(target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """norm((p - q)+), the distribution of the token that replaces a rejected one (Leviathan et al. 2023). Both are
    [..., V]. NaN where one of them has a NaN."""
    excess = (target_prob - draft_prob).clamp_min(0)
    total = excess.sum(-1, keepdim=True)
    # p == q up to rounding: nothing is ever rejected, so any distribution will do; the target's is the safe one.
    return torch.where(total == 0, target_prob, excess / total)


def pick(probs: Tensor, uniform: float) -> int:
    """Inverse-cdf draw of an index of probs [V] by a uniform in [0, 1); never one of probability zero.

    The sum is taken in float64: in float32 it stands still at what is small beside it, and of 150k tokens two thirds
    could never be drawn.

    Raises:
        NonFinite: the probabilities have no sum to draw from.
    """
    if probs.is_cuda:
        index = int(draw_rows(probs[None], torch.tensor([uniform], dtype=torch.float64, device=probs.device)))
        if index == NO_TOKEN:
            raise NonFinite("probabilities")
        return index
    # NumPy looks up with fewer calls. Scaling by the sum as computed keeps the index in range; "right" steps over
    # entries of probability zero.
    if len(probs) >= TOP_MIN_SIZE:
        return _pick_in_blocks(probs.numpy(), uniform)
    cumulative = probs.cumsum(-1, dtype=torch.float64).numpy()
    index = int(cumulative.searchsorted(cumulative[-1] * uniform, "right"))
    return _last(probs.numpy(), cumulative[-1]) if index >= len(probs) else index


def _pick_in_blocks(probs: Any, uniform: float) -> int:
    """`pick` of a NumPy array [V]: the sums of blocks, which are quick to get, say in which block the token is."""
    whole = len(probs) - len(probs) % TOP_BLOCK
    ends = probs[:whole].reshape(-1, TOP_BLOCK).sum(-1, dtype="float64").cumsum()
    total = ends[-1] + probs[whole:].sum(dtype="float64")
    wanted = total * uniform
    block = int(ends.searchsorted(wanted, "right"))  # the rest behind the whole blocks counts as one
    own = probs[block * TOP_BLOCK : (block + 1) * TOP_BLOCK]
    place = int(own.cumsum(dtype="float64").searchsorted(wanted - (ends[block - 1] if block else 0.0), "right"))
    return block * TOP_BLOCK + (_last(own, total) if place >= len(own) else place)


def _last(probs: Any, total: float) -> int:
    """The last token of a NumPy array that has mass, where uniform * total was rounded up to the total, or is NaN."""
    if not 0 < total < math.inf:
        raise NonFinite("probabilities")
    return int(probs.nonzero()[0][-1])


class Source(Protocol):
    """All the randomness that a row of the decoder may use.

    Decoding runs with one that wraps a `torch.Generator`. Tests run the same code with one that follows every branch
    and keeps its exact weight, so that a whole round's distribution is enumerated rather than sampled.
    """

    def accept(self, prob: float) -> bool:
        """True with probability `prob`."""

    def draw(self, probs: Tensor) -> int:
        """An index of `probs` [V], which sums to one; an index of probability zero is never drawn."""


class TorchSource:
    """The decoder's randomness in production: uniforms of a seeded generator, drawn in blocks."""

    BLOCK = 256

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)
        self._uniforms: list[float] = []

    def uniform(self) -> float:
        if not self._uniforms:
            self._fill()
        return self._uniforms.pop()

    def peek(self, count: int) -> list[float]:
        """The next `count` uniforms, which are still to come."""
        while len(self._uniforms) < count:
            self._fill()
        return self._uniforms[: -count - 1 : -1]

    def _fill(self) -> None:
        # Taken from the end: what was drawn before comes first.
        block = torch.rand(self.BLOCK, generator=self._generator, dtype=torch.float64).tolist()
        self._uniforms = block + self._uniforms

    def accept(self, prob: float) -> bool:
        return self.uniform() < prob

    def draw(self, probs: Tensor) -> int:
        return pick(probs, self.uniform())


def draw_rows(probs: Tensor, uniforms: Tensor) -> Tensor:
    """`pick` for rows: probs [B, V], uniforms [B] in [0, 1) -> int64 [B], without waiting for a device: NO_TOKEN where
    `pick` would raise."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    index = torch.searchsorted(cumulative, (total * uniforms.double())[:, None], right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).to(torch.int8).argmax(-1)
    return torch.where((total > 0) & total.isfinite(), torch.minimum(index, last), NO_TOKEN)


def draw_each(probs: Sequence[Tensor] | Tensor, sources: Sequence[Source]) -> list[int]:
    """A draw of each row's own source from its distribution; probs [B, V], or so many of [V]. On a GPU all rows' come
    in one transfer.

    Raises:
        NonFinite: of the first row that has no distribution.
    """
    if len(probs) and probs[0].is_cuda and all(isinstance(source, TorchSource) for source in sources):
        stacked = probs if isinstance(probs, Tensor) else torch.stack(list(probs))
        uniforms = own_uniforms(sources, [1] * len(sources), stacked.device)
        return chosen(draw_rows(stacked, uniforms[:, 0]), "probabilities")
    tokens = []
    for row, (distribution, source) in enumerate(zip(probs, sources, strict=True)):
        try:
            tokens.append(source.draw(distribution))
        except NonFinite as error:
            error.row = row
            raise
    return tokens


def own_uniforms(sources: Sequence[Any], counts: Sequence[int], device: torch.device) -> Tensor:
    """The next counts[b] uniforms of each `TorchSource`, taken from it: float64 [B, K], with zeros behind them."""
    taken = [[source.uniform() for _ in range(count)] for source, count in zip(sources, counts, strict=True)]
    widest = max(counts)
    rows = [[*own, *[0.0] * (widest - len(own))] for own in taken]
    return to_device(torch.tensor(rows, dtype=torch.float64), device)


def chosen(tokens: Tensor, what: str = "logits") -> list[int]:
    """Tokens [B] on the host; raises NonFinite of the first row that has none."""
    found = tokens.tolist()
    if NO_TOKEN in found:
        raise NonFinite(what, row=found.index(NO_TOKEN))
    return found

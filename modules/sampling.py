"""Turn logits into distributions and draw from them: the only place where temperature, top-k and top-p live.

A row without a usable distribution gives NO_TOKEN in place of a token (modules/finite.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

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
# Fewer rows are drawn from faster one by one on a CPU.
FEW_ROWS = 16
# Probabilities that stay in a CPU's cache; of more, the time goes into fetching memory.
CACHED = 2**20


def wide(values: Tensor) -> Tensor:
    """Convert to float32, unless it is float32 or float64 already."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the next-token distribution [..., V] of logits [..., V], in float32 or wider (bf16 is off by 7e-4).

    Order as in transformers: temperature, then top-k, then top-p on what is left, then renormalize. Greedy puts all
    mass on the argmax, the lowest index on ties. Tokens of equal logit at the top-k boundary are all kept. A row with
    NaN or +inf, or with nothing but -inf, has no distribution: it becomes NaN, and nothing can be drawn from it.
    """
    scaled = wide(logits)
    if params.greedy:
        best, index = scaled.max(-1, keepdim=True)
        return torch.zeros_like(scaled).scatter_(-1, index, best - best + 1)  # NaN stays NaN
    if params.temperature != 1:
        if params.temperature < COLD:
            scaled = scaled - scaled.amax(-1, keepdim=True)
        scaled = scaled / min(max(params.temperature, COLDEST), HOTTEST)
    if 0 < params.top_k < scaled.shape[-1]:
        smallest = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    if params.top_p < 1:
        # The smallest set of most probable tokens whose mass reaches top_p; never empty.
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        prob = ordered.softmax(-1)
        mass_before = prob.cumsum(-1, dtype=torch.float64) - prob
        nucleus = torch.zeros_like(scaled, dtype=torch.bool).scatter_(-1, order, mass_before < params.top_p)
        scaled = scaled.masked_fill(~nucleus, -torch.inf)
    return scaled.softmax(-1)


def best_token(logits: Tensor) -> int:
    """Return the argmax of logits [V], of equal ones the lowest index; NO_TOKEN if the best logit is not finite.

    NumPy's argmax is vectorized on a CPU and torch's is not, which matters in a draft step over a large vocabulary.
    Both return the place of a NaN.
    """
    if not logits.is_cpu:
        return int(best_tokens(logits))
    array = wide(logits).numpy()
    token = int(array.argmax())
    return token if math.isfinite(array.item(token)) else NO_TOKEN


def best_tokens(logits: Tensor) -> Tensor:
    """Apply `best_token` to rows: logits [..., V] -> int64 [...], without waiting for a device."""
    if logits.is_cpu:
        array = wide(logits).numpy()
        # Row by row if they do not lie side by side: NumPy would copy them.
        index = torch.as_tensor(array.argmax(-1) if logits.is_contiguous() else [row.argmax(-1) for row in array])
        best = logits.gather(-1, index[..., None])[..., 0]
    else:
        best, index = logits.max(-1)
    return torch.where(best.isfinite(), index, NO_TOKEN)


def top_values(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of each row and their indices, [n, count], largest first; rows [n, V].

    On a CPU the maxima of blocks, which are fast to compute, tell in which blocks they are.
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


def entropies(distributions: Tensor) -> Tensor:
    """Compute -sum p log p in nats of distributions [.., V]; entries of probability zero add nothing."""
    return -torch.xlogy(distributions, distributions).sum(-1)


def residual(target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """Return norm((p - q)+), the distribution that replaces a rejected token (Leviathan et al. 2023).

    Both are [..., V]. NaN if one of them has a NaN.
    """
    excess = (target_prob - draft_prob).clamp_min(0)
    total = excess.sum(-1, keepdim=True)
    # If p == q up to rounding, nothing is ever rejected and any distribution will do; the target's is the safe one.
    return torch.where(total == 0, target_prob, excess / total)


def without(prob: Tensor, token: int) -> Tensor:
    """Return a distribution [V] without one token, renormalized: that of the next draw without replacement."""
    left = prob.clone()
    left[token] = 0
    return left / left.sum()


def pick(probs: Tensor, uniform: float) -> int:
    """Draw an index of probs [V] by inverse cdf from a uniform in [0, 1); never one of probability zero.

    Returns NO_TOKEN if the probabilities have no finite sum. The sum is computed in float64: in float32 it stands still
    at small entries, and of 150k tokens two thirds could never be drawn.
    """
    if probs.is_cuda:
        return int(draw_rows(probs[None], torch.tensor([uniform], dtype=torch.float64, device=probs.device)))
    if len(probs) >= TOP_MIN_SIZE:
        # The sums of blocks, which are fast to compute, tell in which block the token is.
        array = probs.numpy()
        whole = len(array) - len(array) % TOP_BLOCK
        ends = array[:whole].reshape(-1, TOP_BLOCK).sum(-1, dtype="float64").cumsum()
        total = ends[-1] + array[whole:].sum(dtype="float64")
        wanted = total * uniform
        # The rest behind the whole blocks counts as one.
        block = int(ends.searchsorted(wanted, "right"))
        inside = slice(block * TOP_BLOCK, (block + 1) * TOP_BLOCK)
        own = array[inside]
        place = int(own.cumsum(dtype="float64").searchsorted(wanted - (ends[block - 1] if block else 0.0), "right"))
        if place < len(own):
            return block * TOP_BLOCK + place
        # Where the product was rounded up to the total, there may be no mass left from this block on.
        return _last(probs[inside], total, inside.start) if own.any() else _last(probs, total, 0)
    # Scaling by the sum as computed keeps the index in range; "right" steps over entries of probability zero. NumPy
    # looks up with fewer calls than torch.
    cumulative = probs.cumsum(-1, dtype=torch.float64).numpy()
    index = int(cumulative.searchsorted(cumulative[-1] * uniform, "right"))
    return index if index < len(probs) else _last(probs, cumulative[-1], 0)


def _last(probs: Tensor, total: float, first: int) -> int:
    """Return `first` plus the last place with mass, where uniform * total was rounded up; NO_TOKEN for a bad total."""
    return first + int(probs.nonzero()[-1]) if 0 < total < math.inf else NO_TOKEN


class Source(Protocol):
    """All the randomness that a row of the decoder may use.

    Decoding runs with one that wraps a `torch.Generator`. Tests run the same code with one that follows every branch
    and keeps its exact weight, so that a whole round's distribution is enumerated rather than sampled.
    """

    def accept(self, prob: float) -> bool:
        """Return True with probability `prob`."""

    def draw(self, probs: Tensor) -> int:
        """Draw an index of probs [V], which sums to one, as `pick` does."""


class TorchSource:
    """Uniforms of a seeded generator, drawn in blocks: the decoder's randomness in production."""

    BLOCK = 256

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)
        self._uniforms: list[float] = []

    def uniform(self) -> float:
        if not self._uniforms:
            self._fill()
        return self._uniforms.pop()

    def peek(self, count: int) -> list[float]:
        """Return the next `count` uniforms without consuming them."""
        while len(self._uniforms) < count:
            self._fill()
        return self._uniforms[: -count - 1 : -1]

    def skip(self, count: int) -> None:
        """Consume `count` uniforms that were peeked at."""
        del self._uniforms[len(self._uniforms) - count :]

    def _fill(self) -> None:
        # Taken from the end, so a new block goes in front.
        block = torch.rand(self.BLOCK, generator=self._generator, dtype=torch.float64).tolist()
        self._uniforms = block + self._uniforms

    def accept(self, prob: float) -> bool:
        return self.uniform() < prob

    def draw(self, probs: Tensor) -> int:
        return pick(probs, self.uniform())


def draw_rows(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Apply `pick` to rows: probs [B, V], uniforms [B] in [0, 1) -> int64 [B], without waiting for a device."""
    if probs.is_cpu and probs.shape[-1] >= TOP_MIN_SIZE:
        return _pick_rows(probs, uniforms.double())
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    index = torch.searchsorted(cumulative, (total * uniforms.double())[:, None], right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).to(torch.int8).argmax(-1)
    return torch.where((total > 0) & total.isfinite(), torch.minimum(index, last), NO_TOKEN)


def _pick_rows(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Apply `pick` to rows of a large vocabulary on a CPU, with the same sums."""
    size = probs.shape[-1]
    whole = size - size % TOP_BLOCK
    blocks = probs[:, :whole].unflatten(-1, (-1, TOP_BLOCK)).numpy()
    ends = torch.from_numpy(blocks.sum(-1, dtype="float64")).cumsum(-1)  # [B, blocks]
    total = ends[:, -1] + probs[:, whole:].sum(-1, dtype=torch.float64)
    usable = (total > 0) & total.isfinite()
    wanted = torch.where(usable, total, 0.0) * uniforms
    block = torch.searchsorted(ends, wanted[:, None], right=True)  # [B, 1]
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)

    # The chosen block of each row, with nothing behind the vocabulary's end.
    places = block * TOP_BLOCK + torch.arange(TOP_BLOCK)
    own = probs.gather(1, places.clamp_max(size - 1)).masked_fill(places >= size, 0)
    inside = torch.searchsorted(own.cumsum(-1, dtype=torch.float64), wanted[:, None] - before, right=True)
    tokens = torch.where(usable, (block * TOP_BLOCK + inside)[:, 0], NO_TOKEN)
    # The rounding of sums has put the place behind its block.
    for row in (usable & (inside[:, 0] == TOP_BLOCK)).nonzero()[:, 0].tolist():
        tokens[row] = pick(probs[row], uniforms[row].item())
    return tokens


def draw_each(probs: Tensor, sources: Sequence[Source]) -> list[int]:
    """Draw from each row's distribution [B, V] with its own source. On a GPU all rows come in one transfer."""
    seeded = [source for source in sources if isinstance(source, TorchSource)]
    if (len(probs) < FEW_ROWS and probs.is_cpu) or len(seeded) < len(sources):
        return [source.draw(distribution) for distribution, source in zip(probs, sources, strict=True)]
    uniforms = torch.tensor([source.uniform() for source in seeded], dtype=torch.float64)
    return draw_rows(probs, to_device(uniforms, probs.device)).tolist()


def choose_each(logits: Tensor, params: SamplingParams, sources: Sequence[Source]) -> list[int]:
    """Choose a token for each row of logits [B, V]; on a GPU in one transfer.

    Raises:
        NonFinite: a row's numbers choose no token.
    """
    tokens: list[int] = []
    if params.greedy and logits.is_cpu and len(logits) < FEW_ROWS:
        tokens = [best_token(row) for row in logits.unbind()]
    elif params.greedy:
        tokens = best_tokens(logits).tolist()
    else:
        # A CPU computes as many distributions at a time as its caches hold.
        count = max(1, CACHED // logits.shape[-1]) if logits.is_cpu else len(logits)
        for first in range(0, len(logits), count):
            own = slice(first, first + count)
            tokens += draw_each(probabilities(logits[own], params), sources[own])
    if NO_TOKEN in tokens:
        raise NonFinite("logits" if params.greedy else "probabilities", row=tokens.index(NO_TOKEN))
    return tokens


def can_choose_ahead(params: SamplingParams, sources: Sequence[Source]) -> bool:
    """Return whether all random numbers can be read ahead, or none are needed."""
    return params.greedy or all(isinstance(source, TorchSource) for source in sources)


def choose_ahead(
    logits: Tensor,
    step: Callable[[Tensor, int], Tensor],
    count: int,
    params: SamplingParams,
    sources: Sequence[Source],
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Choose `count` tokens of each row, one behind the other, without waiting for the device.

    Uniforms are not consumed: `skip_ahead` those of the tokens that are kept.

    logits: [B, V] for the first ones. step: reads tokens [B] at their place, from 1; returns the next logits [B, V].

    Yields tokens, int64 [B], and the distributions [B, V] that they were drawn from, None if greedy.
    """
    uniforms = torch.empty(0)
    if not params.greedy:
        rows = [source.peek(count) for source in sources if isinstance(source, TorchSource)]
        uniforms = to_device(torch.tensor(rows, dtype=torch.float64), logits.device)  # [B, K]
    for place in range(count):
        distributions = None if params.greedy else probabilities(logits, params)
        tokens = best_tokens(logits) if distributions is None else draw_rows(distributions, uniforms[:, place])
        yield tokens, distributions
        if place + 1 < count:
            # NO_TOKEN has no embedding.
            logits = step(tokens.clamp_min(0), place + 1)


def skip_ahead(count: int, params: SamplingParams, sources: Sequence[Source]) -> None:
    """Consume the uniforms of tokens that `choose_ahead` has chosen and that are kept, `count` of each row."""
    for source in () if params.greedy else sources:
        assert isinstance(source, TorchSource), "see can_choose_ahead"
        source.skip(count)


class Sampler:
    """Choice of the next tokens of a sequence: sampling parameters, and its random numbers."""

    def __init__(self, params: SamplingParams, source: Source):
        self.params, self.source, self.greedy = params, source, params.greedy

    def draw(self, logits: Tensor, position: int = 0) -> tuple[int, Tensor | None]:
        """Choose a token by logits [V].

        position: of the token in its draft, for errors.

        Returns the token, and the distribution [V] that it was drawn from, None if greedy.

        Raises:
            NonFinite: the numbers choose no token.
        """
        distribution = None if self.greedy else probabilities(logits, self.params)
        token = best_token(logits) if distribution is None else self.source.draw(distribution)
        if token == NO_TOKEN:
            raise NonFinite("logits" if distribution is None else "probabilities", position=position)
        return token, distribution

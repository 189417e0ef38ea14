"""What a sampler would emit that is wrong in a known way: p is the target's distribution, q the draft's, all [..., V]
float64.

Each is a distribution in closed form, so that its distance from p, and the chance of finding it, are computed and not
guessed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.modules.sampling import residual

UNLIKELY = 0.15


def emitted(drawn: Tensor, accept: Tensor, replaced: Tensor) -> Tensor:
    """Draw from `drawn`, keep with probability `accept`, else draw from `replaced`."""
    kept = drawn * accept
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp_min(0) * replaced


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q); 1 where q is 0, which is never drawn."""
    return torch.where(q > 0, p / q, 1).clamp_max(1)


def sharpened(distribution: Tensor, temperature: float) -> Tensor:
    """The distribution at so much of its temperature."""
    powered = distribution.pow(1 / temperature)
    total = powered.sum(-1, keepdim=True)
    return torch.where(total > 0, powered / total, distribution)


def reused_accept_draw(p: Tensor, q: Tensor) -> Tensor:
    """The uniform number that drew the token decides on it, too."""
    before = q.cumsum(-1) - q
    accept = torch.where(q > 0, (acceptance(p, q) - before) / q, 1).clamp(0, 1)
    return emitted(q, accept, residual(p, q))


def reused_own_draw(p: Tensor, q: Tensor) -> Tensor:
    """The uniform number that rejected a token draws the one in its place: u beyond the rejected token's p / q."""
    ratio, order = acceptance(p, q).sort(-1)
    mass = q.gather(-1, order)
    ends = residual(p, q).cumsum(-1)
    # of all that was drafted, how much is rejected by numbers below `end`
    count = torch.searchsorted(ratio.contiguous(), ends.contiguous(), right=True)
    of_mass, of_ratio = (torch.nn.functional.pad(x.cumsum(-1), (1, 0)).gather(-1, count) for x in (mass, mass * ratio))
    rejected = ends * of_mass - of_ratio
    replaced = (rejected - torch.nn.functional.pad(rejected, (1, 0))[..., :-1]).clamp_min(0)
    total = replaced.sum(-1, keepdim=True)
    kept = torch.minimum(p, q)
    return kept + (1 - kept.sum(-1, keepdim=True)) * torch.where(total > 0, replaced / total, p)


def dropped_if_unlikely(p: Tensor, q: Tensor) -> Tensor:
    """A policy takes back a drafted token whose own q is below 0.15; the target's own draw stands in its place."""
    likely = q * (q >= UNLIKELY)
    kept = likely * acceptance(p, q)
    dropped, rejected = (mass.sum(-1, keepdim=True) for mass in (q - likely, likely - kept))
    return kept + dropped * p + rejected * residual(p, q)


# Of tokens that had been drawn from q; of those that had been looked for among a node's children; of all.
OF_DRAFTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rejected tokens replaced by draws from p": lambda p, q: emitted(q, acceptance(p, q), p),
    "drafts drawn at 0.8 of their temperature": lambda p, q: emitted(
        sharpened(q, 0.8), acceptance(p, q), residual(p, q)
    ),
    "drafts drawn at 1.25 of their temperature": lambda p, q: emitted(
        sharpened(q, 1.25), acceptance(p, q), residual(p, q)
    ),
    "drafts accepted with 1.25 p/q": lambda p, q: emitted(q, acceptance(1.25 * p, q), residual(p, q)),
    "a draft's own draw decides on it": reused_accept_draw,
    "the draw that rejects a token replaces it": reused_own_draw,
    "drafts of q < 0.15 taken back": dropped_if_unlikely,
}
OF_FIRST = "the draw that rejects a round's first token replaces it"
OF_NODES = "tokens that miss a node's children drawn again"
OF_ALL = "target sampled at 0.9 of its temperature"
DEFECTS = (*OF_DRAFTS, OF_FIRST, OF_NODES, OF_ALL)
# It ends drafts and hides what was drawn, so what a sound method drafted does not tell how surely it would be found: it
# is bet on, and nothing is stated of it.
UNSTATED = "drafts of q < 0.15 taken back"


def defective(name: str, p: Tensor, q: Tensor, children: Tensor, first: Tensor) -> Tensor:
    """The distribution [N, V] under a defect: q is 0 where nothing was drawn, children bool [N, V] false where none was
    chosen; there it is p. first: bool [N], of a round."""
    if name == OF_ALL:
        return sharpened(p, 0.9)
    if name == OF_NODES:
        missed = (p * ~children).sum(-1, keepdim=True)
        return torch.where(children.any(-1, keepdim=True), p * children + missed * p, p)
    drawn = q.sum(-1, keepdim=True) > 0
    if name == OF_FIRST:
        return torch.where(drawn & first[:, None], reused_own_draw(p, q), p)
    return torch.where(drawn, OF_DRAFTS[name](p, q), p)

"""Typical acceptance (Medusa, Cai et al. 2024, section 2.3.1): accept what the target finds typical enough.

It does not keep the target's distribution. Methods that use it are marked as lossy (`Method.lossless`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.finite import NonFinite
from draftsmith.modules.types import InputError, between


@dataclass(frozen=True)
class Typical:
    """Rule that accepts a token x if p(x) > min(eps, delta exp(-H(p))); p is the target's distribution, H in nats."""

    eps: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        between("eps", self.eps, 0, 1)
        if not 0 < self.delta < math.inf:
            raise InputError("delta", self.delta, "a number above 0", "Correct it.")

    def accepts(self, prob: Tensor) -> Tensor:
        """Return which tokens of a distribution [V] are accepted, bool [V]."""
        wide = prob.double()
        entropy = torch.special.entr(wide).sum()
        return wide > torch.clamp(self.delta * torch.exp(-entropy), max=self.eps)

    def path(
        self, tokens: Sequence[int], parents: Sequence[int], distribution: Callable[[int], Tensor]
    ) -> tuple[int, ...]:
        """Return the longest path from the root whose tokens are all accepted; of equally long ones the most probable.

        tokens, parents: of N nodes, as in `DraftTree`. distribution: [V] behind node i by i + 1, 0 is the root.

        Raises:
            NonFinite: a distribution; the position is the node's depth.
        """
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        # Node -> length and log-probability of its path.
        scores = {-1: (0, 0.0)}
        # Parent -> its distribution, and the tokens that are accepted behind it.
        laws: dict[int, tuple[Tensor, Tensor]] = {}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent not in paths:
                continue
            if parent not in laws:
                prob = distribution(parent + 1)
                if prob.sum().isnan():
                    raise NonFinite("probabilities", position=len(paths[parent]))
                laws[parent] = prob, self.accepts(prob)
            prob, accepted = laws[parent]
            if accepted[token]:
                paths[node] = (*paths[parent], node)
                scores[node] = len(paths[node]), scores[parent][1] + math.log(float(prob[token]))
        return paths[max(scores, key=scores.__getitem__)]

"""Typical acceptance (Medusa, Cai et al. 2024, section 2.3.1): what the target finds typical enough is accepted.

It does not keep the target's distribution. Whoever decodes by it says so (`Method.lossless`).
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
    """A token x is accepted where p(x) > min(eps, delta exp(-H(p))), p the target's distribution and H its entropy in
    nats."""

    eps: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        between("eps", self.eps, 0, 1)
        if not 0 < self.delta < math.inf:
            raise InputError("delta", self.delta, "a number above 0", "Correct it.")

    def accepts(self, prob: Tensor) -> Tensor:
        """[V] bool: which tokens would be accepted, by their distribution [V]."""
        wide = prob.double()
        entropy = torch.special.entr(wide).sum()
        if entropy != entropy:
            raise NonFinite("probabilities")
        return wide > torch.clamp(self.delta * torch.exp(-entropy), max=self.eps)

    def path(
        self, tokens: Sequence[int], parents: Sequence[int], distribution: Callable[[int], Tensor]
    ) -> tuple[int, ...]:
        """The longest path of a tree from its root down whose tokens are all accepted; of equally long ones the most
        probable, of equals the first.

        tokens, parents: of N nodes, as of `DraftTree`. distribution: [V] of what follows a node, -1 the root.

        Raises:
            NonFinite: a distribution that was asked for; its position is the node's depth.
        """
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        scores = {-1: (0, 0.0)}  # length, log-probability
        laws: dict[int, tuple[Tensor, Tensor]] = {}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent not in paths:
                continue
            if parent not in laws:
                prob = distribution(parent)
                try:
                    laws[parent] = prob, self.accepts(prob)
                except NonFinite as error:
                    raise error.passed(offset=len(paths[parent])) from None
            prob, accepted = laws[parent]
            if accepted[token]:
                paths[node] = (*paths[parent], node)
                scores[node] = len(paths[node]), scores[parent][1] + math.log(float(prob[token]))
        return paths[max(scores, key=scores.__getitem__)]

"""SpecDec++ acceptance head: will the target keep this drafted token? (Huang et al. 2024, section 3)"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.decoding.protocols import DraftView


@dataclass(frozen=True)
class AcceptanceHeadConfig:
    """Settings of an acceptance head.

    hidden_size: width of the drafter's last hidden state.
    num_blocks: residual blocks, D in the paper.
    w_acc: loss weight of accepted tokens.
    w_rej: loss weight of rejected tokens.
    tied: one block applied num_blocks times, as SpecDec++'s published code does.
    calibration: scale and shift of the logit fitted on held-out tokens, on top of the correction for the weights.
    """

    hidden_size: int
    num_blocks: int = 3
    w_acc: float = 1.0
    w_rej: float = 6.0
    tied: bool = False
    calibration: tuple[float, float] = (1.0, 0.0)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); starts as the identity would with W = 0, as in Medusa's heads."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class AcceptanceHead(nn.Module):
    """num_blocks residual blocks, then one logit, in float32.

    Input e_i [.., H]: the drafter's last hidden state once it has read drafted token y_i. Output: the raw logit [..] of
    P^(y_i is accepted | its prefix was). Under w_rej != w_acc the raw output is not a probability; `calibrated` is.
    """

    def __init__(self, config: AcceptanceHeadConfig):
        super().__init__()
        self.config = config
        first = ResidualBlock(config.hidden_size)
        count = config.num_blocks
        more = [first if config.tied else ResidualBlock(config.hidden_size) for _ in range(count - 1)]
        self.blocks = nn.ModuleList([first, *more][:count])
        self.out = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.float()
        for block in self.blocks:
            x = block(x)
        return self.out(x).squeeze(-1)

    def corrected(self, logit: Tensor) -> Tensor:
        """The raw logit without the loss' weights: the optimum is w_acc P / (w_acc P + w_rej (1-P)), so add
        log(w_rej/w_acc)."""
        return logit + math.log(self.config.w_rej / self.config.w_acc)

    def calibrated(self, logit: Tensor) -> Tensor:
        """The logit of a probability: corrected, then the scale and shift that were fitted on held-out tokens."""
        scale, shift = self.config.calibration
        return scale * self.corrected(logit) + shift


class SpecDecPP:
    """Stop when P(at least one drafted token is rejected) = 1 - prod p^ exceeds h (SpecDec++ section 3.2).

    The head reads a token one forward after it was drafted: when token n is shown, tokens 1..n-1 have been judged, and
    token n, sampled from the forward that judged the last of them, stays in the draft.
    """

    def __init__(
        self,
        head: AcceptanceHead,
        h: float = 0.7,
        min_drafted: int = 2,
        max_drafted: int = 20,
        calibrated: bool = False,
    ):
        """h: threshold in (0, 1). calibrated: judge by the calibrated probability, not by the paper's raw output."""
        self.h, self.min_drafted, self.max_drafted, self.calibrated = h, min_drafted, max_drafted, calibrated
        # A copy of the head's arithmetic on plain tensors: module calls are most of its cost at this size.
        linears: list = [block.linear for block in head.blocks]
        self._blocks = [(linear.weight.detach(), linear.bias.detach()) for linear in linears]
        self._out = (head.out.weight.detach(), head.out.bias.detach())
        self._head = head
        self._survival = 1.0

    def reset(self) -> None:
        """Nothing is remembered between prompts."""

    def start_round(self) -> None:
        self._survival = 1.0

    def should_stop(self, view: DraftView) -> bool:
        if view.num_drafted >= self.max_drafted:
            return True
        if view.num_drafted >= 2:
            self._survival *= self.accept_prob(view.hidden)
        return view.num_drafted >= self.min_drafted and 1 - self._survival > self.h

    def accept_prob(self, hidden: Tensor) -> float:
        """p^ of the token that `hidden` [H] has read."""
        x = hidden.float()
        for weight, bias in self._blocks:
            x = x + F.silu(F.linear(x, weight, bias))
        logit = F.linear(x, *self._out)
        if self.calibrated:
            logit = self._head.calibrated(logit)
        return torch.sigmoid(logit).item()

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Nothing is learned while decoding."""

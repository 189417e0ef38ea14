"""Acceptance heads: predict whether the target accepts a drafted token (SpecDec++, Huang et al. 2024, section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.decoding.stop import DraftView, Predictor, sigmoid
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.llama_config import MOST_LAYERS, MOST_SIZE
from draftsmith.modules.types import check_config

Logit = TypeVar("Logit", float, Tensor)


@dataclass(frozen=True)
class AcceptanceHeadConfig:
    """Settings of an acceptance head.

    hidden_size: width of the drafter's last hidden state.
    num_blocks: residual blocks, D in the paper.
    w_acc: loss weight of accepted tokens.
    w_rej: loss weight of rejected tokens.
    tied: one block applied num_blocks times, as SpecDec++'s published code does.
    calibration: scale and shift of the logit fitted on held-out tokens, after the correction for the loss weights.
    """

    hidden_size: int
    num_blocks: int = 3
    w_acc: float = 1.0
    w_rej: float = 6.0
    tied: bool = False
    calibration: tuple[float, float] = (1.0, 0.0)

    def __post_init__(self) -> None:
        check_config(
            self,
            hidden_size=(1, MOST_SIZE),
            num_blocks=(0, MOST_LAYERS),
            w_acc=(1e-6, 1e6),
            w_rej=(1e-6, 1e6),
            calibration=(-1e6, 1e6),
        )


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), with W = 0 at the start, as in SpecDec++ and Medusa."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class AcceptanceHead(nn.Module):
    """Residual blocks and one logit, in float32.

    It reads e_i [.., H], the drafter's last hidden state once it has read drafted token y_i. Output: the raw logit [..]
    of P^(y_i is accepted | its prefix was). With w_rej != w_acc it is no probability; `calibrated` is.
    """

    kind = "acceptance"
    Config = AcceptanceHeadConfig
    trained = False  # as `DraftHead.trained`

    def __init__(self, config: AcceptanceHeadConfig):
        super().__init__()
        self.config = config
        # Tied blocks share one module.
        first = ResidualBlock(config.hidden_size)
        count = config.num_blocks
        more = [first if config.tied else ResidualBlock(config.hidden_size) for _ in range(count - 1)]
        self.blocks = nn.ModuleList([first, *more][:count])
        self.out = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return raw logits [..] of states [.., H]."""
        x = hidden.float()
        for block in self.blocks:
            x = block(x)
        return self.out(x).squeeze(-1)

    def corrected(self, logit: Logit) -> Logit:
        """Remove the loss weights from a raw logit: the optimum is w_acc P / (w_acc P + w_rej (1-P)), so add
        log(w_rej/w_acc)."""
        return logit + math.log(self.config.w_rej / self.config.w_acc)

    def calibrated(self, logit: Logit) -> Logit:
        """Return the logit of a probability: corrected, then scaled and shifted as fitted on held-out tokens."""
        scale, shift = self.config.calibration
        return scale * self.corrected(logit) + shift


class HeadPredictor(Predictor):
    """P(a drafted token is accepted) by an acceptance head, token by token while decoding.

    The draft waits for every prediction: modules are not called, and calibration, which is affine, is folded into the
    output's weights.
    """

    late, learns = True, False

    def __init__(self, head: AcceptanceHead, calibrated: bool = True):
        """calibrated: predict the probability; else the raw output, which the paper's threshold is for."""
        linears = [cast(ResidualBlock, block).linear for block in head.blocks]
        self._blocks = [(linear.weight.detach(), linear.bias.detach()) for linear in linears]
        shift = head.calibrated(0.0) if calibrated else 0.0
        scale = head.calibrated(1.0) - shift if calibrated else 1.0
        self._out, self._shift = scale * head.out.weight.detach()[0], scale * head.out.bias.item() + shift

    def prob(self, view: DraftView) -> float:
        """Return the probability of the token before the one shown, 1 if there is none.

        Raises:
            NonFinite: the head's output is not finite.
        """
        # This state has read the token before: predict that one.
        if view.num_drafted == 1:
            return 1.0
        x = view.hidden.float()  # [H]
        for weight, bias in self._blocks:
            x = x + F.silu(F.linear(x, weight, bias))
        logit = torch.dot(x, self._out).item() + self._shift
        if not math.isfinite(logit):
            # Of the last token but one.
            raise NonFinite("output", "acceptance", -2)
        return sigmoid(logit)

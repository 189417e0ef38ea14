"""Acceptance heads: will the target keep this drafted token? (SpecDec++, Huang et al. 2024, section 3, and more)"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules import flops
from draftsmith.modules.decoding.confidence import MAX_LOGIT, TokenConfidences, log_odds_of
from draftsmith.modules.layers import MOST_LAYERS, MOST_SIZE
from draftsmith.modules.types import InputError, check_config

State = Literal["after", "before", "undrawn"]
Number = TypeVar("Number", float, Tensor)
Feature = Literal["log_q", "logit_q", "logit_max_q", "entropy", "depth", "temperature", "repeat", "repeat_mean"]
# Those that look at the token; the others are there before it is drawn.
SEES_TOKEN: frozenset[Feature] = frozenset(("log_q", "logit_q", "repeat"))


# Settings of earlier versions' heads, and the values at which they change nothing. A head had predicted for a tree's
# children too (docs/acceptance.md), and been calibrated by a curve.
RETIRED: dict[str, Any] = {"judges": "chain", "knots": []}


@dataclass(frozen=True)
class AcceptanceHeadConfig:
    """Settings of an acceptance head.

    hidden_size: width of the drafter's last hidden state.
    num_blocks: residual blocks, D in the paper.
    w_acc: loss weight of accepted tokens.
    w_rej: loss weight of rejected tokens.
    tied: one block applied num_blocks times, as SpecDec++'s published code does.
    calibration: scale and shift of the logit fitted on held-out tokens, on top of the correction for the weights.
    state: `after`, the drafter's state once it has read the token, as published; `before`, the state that predicted it,
        and the token's embedding: asked without another forward; `undrawn`, the state that predicted it and nothing of
        the token: P that whatever is drawn there is accepted, for those who drop tokens that are drawn already.
    features: numbers of the distribution that the token was drawn from, and of where it stands (`feature_values`).
    width: of the hidden layers, where there is more to read than a state; 0 is hidden_size.
    activation: what follows the layer that brings what is read to one width; with `relu` the features go straight to
        the logit and nowhere else, which predicts as well, and costs a drafted token less.
    standardize: all that is read is read less a mean and by a scale, buffers of the head.
    """

    hidden_size: int
    num_blocks: int = 3
    w_acc: float = 1.0
    w_rej: float = 6.0
    tied: bool = False
    calibration: tuple[float, float] = (1.0, 0.0)
    state: State = "after"
    features: tuple[Feature, ...] = ()
    width: int = 0
    activation: Literal["none", "relu"] = "none"
    standardize: bool = False

    def __post_init__(self) -> None:
        check_config(
            self,
            hidden_size=(1, MOST_SIZE),
            num_blocks=(0, MOST_LAYERS),
            w_acc=(1e-6, 1e6),
            w_rej=(1e-6, 1e6),
            calibration=(-1e6, 1e6),
            width=(0, MOST_SIZE),
        )
        if len(set(self.features)) != len(self.features):
            raise InputError("features", ", ".join(self.features), "each once", "Leave one out.")
        if not self.joins and (self.activation != "none" or self.standardize):
            found = f"activation {self.activation}, standardize {self.standardize} of a head of the state alone"
            raise InputError("head", found, "neither without a first layer", "Leave them out, or choose a width.")
        if self.state == "undrawn" and (seen := [name for name in self.features if name in SEES_TOKEN]):
            expected = f"for state undrawn none of {', '.join(sorted(SEES_TOKEN))}, which look at the token"
            raise InputError("features", ", ".join(seen), expected, "Leave them out, or choose state before.")

    @property
    def late(self) -> bool:
        """A token's prediction comes one token later: what it reads is there once the drafter has read the token."""
        return self.state == "after"

    @property
    def reads_token(self) -> bool:
        """The token's embedding is read."""
        return self.state == "before"

    @property
    def as_published(self) -> bool:
        """It reads what SpecDec++'s head reads: the state after the token, and nothing else."""
        return self.late and not self.features

    @property
    def inner_size(self) -> int:
        """Width of the hidden layers."""
        return self.width or self.hidden_size

    @property
    def joins(self) -> bool:
        """There is a layer that brings what is read to the width of the others."""
        wider = self.joined_size > self.hidden_size or self.inner_size != self.hidden_size
        return wider or self.state == "undrawn"

    @property
    def joined_size(self) -> int:
        """Width of what the first layer reads: the state, before the token its embedding too, and features."""
        return self.input_size - (len(self.features) if self.activation == "relu" else 0)

    @property
    def input_size(self) -> int:
        """Width of all that is read: the state, before the token its embedding too, and the features."""
        return self.hidden_size * (1 + self.reads_token) + len(self.features)


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

    Published form: the input e_i [.., H] is the drafter's last hidden state once it has read drafted token y_i. Where
    there is more to read (`AcceptanceHeadConfig`), a linear layer brings all of it to one width first, and the features
    also go straight to the logit: what the draft's own confidence says needs no hidden layer. Output: the raw logit
    [..] of P^(y_i is accepted | its prefix was). With w_rej != w_acc it is no probability; `calibrated` is.
    """

    kind = "acceptance"
    Config = AcceptanceHeadConfig
    # [input_size], where the settings standardise; nothing is changed until they are set.
    mean: Tensor
    scale: Tensor

    def __init__(self, config: AcceptanceHeadConfig):
        super().__init__()
        self.config = config
        size = config.inner_size
        self.join = nn.Linear(config.joined_size, size) if config.joins else None
        first = ResidualBlock(size)
        count = config.num_blocks
        more = [first if config.tied else ResidualBlock(size) for _ in range(count - 1)]
        self.blocks = nn.ModuleList([first, *more][:count])
        self.out = nn.Linear(size, 1)
        self.direct = nn.Linear(len(config.features), 1, bias=False) if config.features else None
        if config.standardize:
            self.register_buffer("mean", torch.zeros(config.input_size))
            self.register_buffer("scale", torch.ones(config.input_size))

    def forward(self, hidden: Tensor, embeds: Tensor | None = None, features: Tensor | None = None) -> Tensor:
        """hidden [.., H]; embeds [.., H] of the tokens, for state `before`; features [.., F] (`feature_values`)."""
        given = torch.cat([part.float() for part in (hidden, embeds, features) if part is not None], -1)
        if self.config.standardize:
            given = (given - self.mean) / self.scale
        x = given[..., : self.config.joined_size]
        numbers = given[..., self.config.input_size - len(self.config.features) :]
        if self.join is not None:
            x = self.join(x)
        if self.config.activation == "relu":
            x = F.relu(x)
        for block in self.blocks:
            x = block(x)
        logit = self.out(x)
        if self.direct is not None:
            logit = logit + self.direct(numbers)
        return logit.squeeze(-1)

    @torch.no_grad()
    def folded(self) -> AcceptanceHead:
        """The same function of what it reads, frozen, its means and scales in its weights and biases."""
        if not self.config.standardize:
            return self
        head = AcceptanceHead(replace(self.config, standardize=False)).requires_grad_(False).double()
        head.load_state_dict(self.state_dict(), strict=False)
        mean, scale, joined = self.mean.double(), self.scale.double(), self.config.joined_size
        assert head.join is not None
        head.join.weight /= scale[:joined]
        head.join.bias.sub_(head.join.weight @ mean[:joined])
        if head.direct is not None:
            head.direct.weight /= scale[-len(self.config.features) :]
            head.out.bias.sub_(head.direct.weight @ mean[-len(self.config.features) :])
        return head.to(self.mean)

    def corrected(self, logit: Number) -> Number:
        """The raw logit without the loss' weights: the optimum is w_acc P / (w_acc P + w_rej (1-P)), so add
        log(w_rej/w_acc)."""
        return logit + math.log(self.config.w_rej / self.config.w_acc)

    def calibrated(self, logit: Number) -> Number:
        """The logit of a probability: corrected, then as fitted on held-out tokens."""
        scale, shift = self.config.calibration
        return scale * self.corrected(logit) + shift

    def feature_values(self, known: TokenConfidences) -> Tensor:
        """[.., F]: the numbers that this head reads beside states, in the order of its settings. Numbers that tokens
        have in common may be of a shape that expands to theirs."""
        values = [feature_value(name, known) for name in self.config.features]
        return torch.stack(torch.broadcast_tensors(*values), -1)


# Of tokens [..]: log q(y) from -MAX_LOGIT on; the log-odds of q(y) and of max q within MAX_LOGIT; the distribution's
# entropy in nats; the logarithm of the place in the round, from 1; the temperature; and how the token goes on with a
# repetition of the text (`acceptance.repeats.Repeats.score`), where whoever feeds the head looked for one, or
# the mean of that over what may be drawn, `RepeatScores.mean`.
FEATURE_VALUES: dict[Feature, Callable[[TokenConfidences], Tensor | None]] = {
    "log_q": lambda known: known.log_q.clamp_min(-MAX_LOGIT),
    "logit_q": lambda known: log_odds_of(known.log_q),
    "logit_max_q": lambda known: log_odds_of(known.log_max_q),
    "entropy": lambda known: known.entropy,
    "depth": lambda known: known.depth.log(),
    "temperature": lambda known: known.temperature,
    "repeat": lambda known: known.repeat,
    "repeat_mean": lambda known: known.repeat_mean,
}


def feature_value(name: Feature, known: TokenConfidences) -> Tensor:
    """One of `FEATURE_VALUES`."""
    value = FEATURE_VALUES[name](known)
    assert value is not None, "looked for by whoever feeds this head"
    return value


def acceptance_forward(head: AcceptanceHeadConfig, rows: int) -> float:
    """An acceptance head; tied blocks compute as much as others."""
    size = head.inner_size
    read = flops.linear(head.joined_size, size, rows) if head.joins else 0.0
    return read + head.num_blocks * flops.linear(size, size, rows) + flops.linear(size + len(head.features), 1, rows)


def acceptance_training(head: AcceptanceHeadConfig, rows: int) -> float:
    """Forward and backward of an acceptance head over `rows` tokens whose inputs are there."""
    wide = head.num_blocks or head.joins
    first = flops.linear(head.joined_size, head.inner_size if wide else 1, rows) + flops.linear(
        len(head.features), 1, rows
    )
    return flops.TRAINED * acceptance_forward(head, rows) - (flops.TRAINED - flops.TRAINED_FIRST) * first

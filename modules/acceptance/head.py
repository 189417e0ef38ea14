"""Acceptance heads: predict whether the target accepts a drafted token (SpecDec++, Huang et al. 2024, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules import flops
from draftsmith.modules.decoding.confidence import MAX_LOGIT, TokenConfidence, log_odds
from draftsmith.modules.layers import MOST_LAYERS, MOST_SIZE
from draftsmith.modules.types import Feature, InputError, State, check_config


def log_of(value: Any) -> Any:
    """Return the natural logarithm of a number or a tensor."""
    return value.log() if isinstance(value, Tensor) else math.log(value)


def bounded(log_q: Any) -> Any:
    """Return log q, at least -MAX_LOGIT."""
    return log_q.clamp_min(-MAX_LOGIT) if isinstance(log_q, Tensor) else max(log_q, -MAX_LOGIT)


# Features of one drafted token, or of tokens [..]: log q(y), at least -MAX_LOGIT; the log-odds of q(y) and max q within
# MAX_LOGIT; the entropy in nats; the logarithm of the place in the round, from 1; the temperature; and whether the
# token continues a repetition.
FEATURES: dict[Feature, Callable[[TokenConfidence], Any]] = {
    "log_q": lambda known: bounded(known.log_q),
    "logit_q": lambda known: log_odds(known.log_q),
    "logit_max_q": lambda known: log_odds(known.log_max_q),
    "entropy": lambda known: known.entropy,
    "depth": lambda known: log_of(known.depth),
    "temperature": lambda known: known.temperature,
    "repeat": lambda known: known.repeat,
}


@dataclass(frozen=True)
class AcceptanceHeadConfig:
    """Settings of an acceptance head.

    hidden_size: width of the drafter's last hidden state.
    num_blocks: residual blocks, D in the paper.
    w_acc: loss weight of accepted tokens.
    w_rej: loss weight of rejected tokens.
    tied: one block applied num_blocks times, as SpecDec++'s published code does.
    calibration: scale and shift of the logit fitted on held-out tokens, after the correction for the loss weights.
    state: `after`, the drafter's state once it has read the token, as published; `before`, the state that predicted it
        and the token's embedding, which needs no further forward.
    features: numbers of the distribution that the token was drawn from, and of its place (`FEATURES`).
    width: of the hidden layers; 0 is hidden_size.
    activation: after the join layer. With `relu` features go to the logit only, which predicts as well and costs less.
    standardize: subtract a mean from all inputs and divide by a scale, buffers of the head.
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

    @property
    def late(self) -> bool:
        """True if a token is predicted one token later, once the drafter has read it."""
        return self.state == "after"

    @property
    def reads_token(self) -> bool:
        """True if the head reads the token's embedding."""
        return self.state == "before"

    @property
    def as_published(self) -> bool:
        """True if the head reads what SpecDec++'s does: the state after the token alone."""
        return self.late and not self.features

    @property
    def inner_size(self) -> int:
        """Width of the hidden layers."""
        return self.width or self.hidden_size

    @property
    def joins(self) -> bool:
        """True if a join layer brings the inputs to the width of the hidden layers."""
        return self.joined_size > self.hidden_size or self.inner_size != self.hidden_size

    @property
    def joined_size(self) -> int:
        """Width of the join layer's input: state, embedding if it is read, features if they join."""
        return self.input_size - (len(self.features) if self.activation == "relu" else 0)

    @property
    def input_size(self) -> int:
        """Width of all inputs: state, embedding if it is read, features."""
        return self.hidden_size * (1 + self.reads_token) + len(self.features)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), with W = 0 at the start, as in Medusa's heads."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class AcceptanceHead(nn.Module):
    """Residual blocks and one logit, in float32.

    The published head reads e_i [.., H], the drafter's last hidden state once it has read drafted token y_i. With more
    inputs (`AcceptanceHeadConfig`) a join layer brings them to one width first, and the features also go straight to
    the logit, as confidence needs no hidden layer. Output: the raw logit [..] of P^(y_i is accepted | its prefix was).
    With w_rej != w_acc it is no probability; `calibrated` is.
    """

    kind = "acceptance"
    Config = AcceptanceHeadConfig
    # [input_size], with `standardize`; 0 and 1 until they are fitted.
    mean: Tensor
    scale: Tensor

    def __init__(self, config: AcceptanceHeadConfig):
        super().__init__()
        self.config = config
        size = config.inner_size
        self.join = nn.Linear(config.joined_size, size) if config.joins else None
        # Tied blocks share one module.
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
        """Return raw logits [..]. hidden: [.., H]. embeds: [.., H] of the tokens, for state `before`. features:
        [.., F], by `feature_values`."""
        inputs = torch.cat([part.float() for part in (hidden, embeds, features) if part is not None], -1)
        if self.config.standardize:
            inputs = (inputs - self.mean) / self.scale
        # A rectified head's features skip the hidden layers.
        x = inputs[..., : self.config.joined_size]
        numbers = inputs[..., self.config.input_size - len(self.config.features) :]  # [.., F]
        if self.join is not None:
            x = self.join(x)  # [.., W]
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
        """Return the same function of raw inputs, frozen: means and scales are folded into weights and biases."""
        if not self.config.standardize:
            return self
        head = AcceptanceHead(replace(self.config, standardize=False)).requires_grad_(False).double()
        head.load_state_dict(self.state_dict(), strict=False)
        mean, scale, joined = self.mean.double(), self.scale.double(), self.config.joined_size
        # w (x - mean) / scale = (w / scale) x - (w / scale) mean.
        assert head.join is not None
        head.join.weight /= scale[:joined]
        head.join.bias.sub_(head.join.weight @ mean[:joined])
        if head.direct is not None:
            head.direct.weight /= scale[-len(self.config.features) :]
            head.out.bias.sub_(head.direct.weight @ mean[-len(self.config.features) :])
        return head.to(self.mean)

    def corrected(self, logit: Any) -> Any:
        """Remove the loss weights from a raw logit: the optimum is w_acc P / (w_acc P + w_rej (1-P)), so add
        log(w_rej/w_acc)."""
        return logit + math.log(self.config.w_rej / self.config.w_acc)

    def calibrated(self, logit: Any) -> Any:
        """Return the logit of a probability: corrected, then scaled and shifted as fitted on held-out tokens."""
        scale, shift = self.config.calibration
        return scale * self.corrected(logit) + shift

    def feature_values(self, known: TokenConfidence) -> Tensor:
        """Return the features [.., F] of this head, in the order of its config. Values that tokens share may have a
        shape that broadcasts."""
        values = [FEATURES[name](known) for name in self.config.features]
        return torch.stack(torch.broadcast_tensors(*values), -1)


def acceptance_training(head: AcceptanceHeadConfig, rows: int) -> float:
    """Return the FLOPs of forward and backward over `rows` tokens with given inputs."""
    size, direct = head.inner_size, flops.linear(len(head.features), 1, rows)
    read = flops.linear(head.joined_size, size, rows) if head.joins else 0.0
    # Tied blocks compute as much as others.
    forward = read + head.num_blocks * flops.linear(size, size, rows) + flops.linear(size, 1, rows) + direct
    first = flops.linear(head.joined_size, size if head.num_blocks or head.joins else 1, rows) + direct
    return flops.TRAINED * forward - (flops.TRAINED - flops.TRAINED_FIRST) * first

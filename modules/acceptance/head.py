"""Acceptance heads: will the target keep this drafted token? (SpecDec++, Huang et al. 2024, section 3, and more)"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.acceptance.repeats import RepeatScores
from draftsmith.modules.decoding.confidence import (
    MAX_LOGIT,
    TokenConfidence,
    TokenConfidences,
    confidence_of,
    log_odds,
    log_odds_of,
    sigmoid,
    wide,
)
from draftsmith.modules.decoding.protocols import DraftView
from draftsmith.modules.finite import NonFinite

LARGEST_TABLE = 2**24  # numbers, 64 MiB: of what a first layer makes of every token, worked out beforehand
State = Literal["after", "before"]
Feature = Literal["log_q", "logit_q", "logit_max_q", "entropy", "depth", "temperature", "repeat"]


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
        and the token's embedding: asked without another forward.
    features: numbers of the distribution that the token was drawn from, and of where it stands (`feature_values`).
    judges: what it predicts for: `chain`, the drafted tokens of a chain; `tree`, the most probable children of a
        tree's node.
    width: of the hidden layers, where there is more to read than a state; 0 is hidden_size.
    knots: isotonic calibration: (corrected logit, calibrated logit) in ascending order, with straight lines between
        them; it takes the place of `calibration`.
    """

    hidden_size: int
    num_blocks: int = 3
    w_acc: float = 1.0
    w_rej: float = 6.0
    tied: bool = False
    calibration: tuple[float, float] = (1.0, 0.0)
    state: State = "after"
    features: tuple[Feature, ...] = ()
    judges: Literal["chain", "tree"] = "chain"
    width: int = 0
    knots: tuple[tuple[float, float], ...] = ()

    @property
    def late(self) -> bool:
        """A token's prediction comes one token later: what it reads is there once the drafter has read the token."""
        return self.state == "after"

    @property
    def as_published(self) -> bool:
        """It reads what SpecDec++'s head reads: of a chain the state after the token, and nothing else."""
        return self.late and not self.features and self.judges == "chain"

    @property
    def inner_size(self) -> int:
        """Width of the hidden layers."""
        return self.width or self.hidden_size

    @property
    def joins(self) -> bool:
        """There is a layer that brings what is read to the width of the others."""
        return self.input_size > self.hidden_size or self.inner_size != self.hidden_size

    @property
    def input_size(self) -> int:
        """Width of what is read: the state, before the token its embedding too, and the features."""
        return self.hidden_size * (2 if self.state == "before" else 1) + len(self.features)


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

    def __init__(self, config: AcceptanceHeadConfig):
        super().__init__()
        self.config = config
        size = config.inner_size
        self.join = nn.Linear(config.input_size, size) if config.joins else None
        first = ResidualBlock(size)
        count = config.num_blocks
        more = [first if config.tied else ResidualBlock(size) for _ in range(count - 1)]
        self.blocks = nn.ModuleList([first, *more][:count])
        self.out = nn.Linear(size, 1)
        self.direct = nn.Linear(len(config.features), 1, bias=False) if config.features else None

    def forward(self, hidden: Tensor, embeds: Tensor | None = None, features: Tensor | None = None) -> Tensor:
        """hidden [.., H]; embeds [.., H] of the tokens, for state `before`; features [.., F] (`feature_values`)."""
        given = [part.float() for part in (hidden, embeds, features) if part is not None]
        return self.rest(given[0] if self.join is None else self.join(torch.cat(given, -1)), features)

    def rest(self, x: Tensor, features: Tensor | None) -> Tensor:
        """The raw logit [..] from what the blocks read, x [.., W], and the features, which go to the logit too."""
        for block in self.blocks:
            x = block(x)
        logit = self.out(x)
        if self.direct is not None:
            assert features is not None
            logit = logit + self.direct(features.float())
        return logit.squeeze(-1)

    def corrected(self, logit: Tensor) -> Tensor:
        """The raw logit without the loss' weights: the optimum is w_acc P / (w_acc P + w_rej (1-P)), so add
        log(w_rej/w_acc)."""
        return logit + math.log(self.config.w_rej / self.config.w_acc)

    def calibrated(self, logit: Tensor) -> Tensor:
        """The logit of a probability: corrected, then as fitted on held-out tokens."""
        logit = self.corrected(logit)
        if self.config.knots:
            return interpolate(logit, self.config.knots)
        scale, shift = self.config.calibration
        return scale * logit + shift

    def feature_values(self, known: TokenConfidences) -> Tensor:
        """[.., F]: the numbers that this head reads beside states, in the order of its settings. Numbers that tokens
        have in common may be of a shape that expands to theirs."""
        values = [feature_value(name, known) for name in self.config.features]
        return torch.stack(torch.broadcast_tensors(*values), -1)


def feature_value(name: Feature, known: TokenConfidences) -> Tensor:
    """One of them, of tokens [..]: log q(y) from -MAX_LOGIT on; the log-odds of q(y) and of max q within MAX_LOGIT;
    the distribution's entropy in nats; the logarithm of the place in the round, from 1; the temperature; and how the
    token goes on with a repetition of the text (`acceptance.repeats.Repeats.score`)."""
    if name == "log_q":
        return known.log_q.clamp_min(-MAX_LOGIT)
    if name == "logit_q":
        return log_odds_of(known.log_q)
    if name == "logit_max_q":
        return log_odds_of(known.log_max_q)
    if name == "entropy":
        return known.entropy
    if name == "depth":
        return known.depth.log()
    if name == "temperature":
        return known.temperature
    assert known.repeat is not None, "looked for by whoever feeds this head"
    return known.repeat


def scalar_value(name: Feature, known: TokenConfidence, view: DraftView) -> float:
    """`feature_value` of the token shown; `repeat` is not of the token alone."""
    if name == "log_q":
        return max(known.log_q, -MAX_LOGIT)
    if name == "logit_q":
        return log_odds(known.log_q)
    if name == "logit_max_q":
        return log_odds(known.log_max_q)
    if name == "entropy":
        return known.entropy
    if name == "depth":
        return math.log(view.num_drafted)
    assert name == "temperature"
    return view.temperature


def interpolate(logit: Tensor, knots: tuple[tuple[float, float], ...]) -> Tensor:
    """Straight lines between the knots, and their end values beyond them."""
    x, y = torch.tensor(knots, dtype=logit.dtype, device=logit.device).T.contiguous()
    right = torch.searchsorted(x, logit.contiguous(), right=True).clamp(1, len(x) - 1)
    left = right - 1
    share = ((logit - x[left]) / (x[right] - x[left])).clamp(0, 1)
    return y[left] + share * (y[right] - y[left])


class HeadPredictor:
    """P^ of drafted tokens by an acceptance head, one by one while decoding."""

    learns = False

    def __init__(self, head: AcceptanceHead, embed: Callable[[Tensor], Tensor] | None = None, calibrated: bool = True):
        """embed: the drafter's token embeddings, for a head that reads the state before the token. calibrated: the
        probability; else the raw output, which the paper's threshold is for."""
        config = head.config
        assert config.late or embed is not None
        self.late = config.late
        self._names = config.features
        self._logit = _OnCpu(head, embed) if head.out.weight.device.type == "cpu" else _OnDevice(head, embed)
        self._correction = math.log(config.w_rej / config.w_acc) if calibrated else 0.0
        self._knots = config.knots if calibrated else ()
        self._scale, self._shift = config.calibration if calibrated else (1.0, 0.0)
        self._before: list[float] = []  # of a late one: features of the token that it speaks of next
        self._repeats = RepeatScores() if "repeat" in config.features else None

    def beside(self) -> HeadPredictor:
        """One for another draft at the same time; it shares the head's weights and what was made of them."""
        other = copy(self)
        other._before, other._repeats = [], RepeatScores() if self._repeats is not None else None
        return other

    def reset(self) -> None:
        if self._repeats is not None:
            self._repeats.reset()

    def start_round(self) -> None:
        self._before = []

    def prob(self, view: DraftView) -> float:
        """Probability of the token shown; of a `late` one that of the one before it, and 1 where there is none.

        Raises:
            NonFinite: the head's output.
        """
        values = self._features(view)
        if self.late and view.num_drafted == 1:
            return 1.0
        logit = self._logit(view, values)
        if not math.isfinite(logit):
            raise NonFinite("output", "acceptance", -2 if self.late else -1)  # of the last token but one, or the last
        return self._prob(logit)

    def _features(self, view: DraftView) -> list[float]:
        """Features of the token that is asked about."""
        if not self._names:
            return []
        known = confidence_of(view)
        repeat = self._repeats.score(view) if self._repeats is not None else 0.0
        values = [repeat if name == "repeat" else scalar_value(name, known, view) for name in self._names]
        if self.late:
            values, self._before = self._before, values
        return values

    def _prob(self, logit: float) -> float:
        logit += self._correction
        if self._knots:
            place = min(max(bisect_right(self._knots, (logit, math.inf)), 1), len(self._knots) - 1)
            (x0, y0), (x1, y1) = self._knots[place - 1], self._knots[place]
            logit = y0 + min(max((logit - x0) / (x1 - x0), 0.0), 1.0) * (y1 - y0)
        else:
            logit = self._scale * logit + self._shift
        return sigmoid(logit)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Nothing is learned while decoding."""


class _OnDevice:
    """A head's raw logit of one token, by the head."""

    def __init__(self, head: AcceptanceHead, embed: Callable[[Tensor], Tensor] | None):
        self._head, self._embed, self._device = head, embed, head.out.weight.device

    def __call__(self, view: DraftView, values: list[float]) -> float:
        """values: the head's features of the token that is asked about."""
        embeds = None
        if self._head.config.state == "before":
            assert self._embed is not None
            embeds = self._embed(torch.tensor(view.token, device=self._device))
        features = torch.tensor(values, device=self._device) if values else None
        with torch.inference_mode():
            return self._head(view.hidden, embeds, features).item()


class _OnCpu:
    """The head's arithmetic in fewer and shorter calls, which are most of the cost at this size: numpy's where they
    start no threads of their own, into memory that is used again, and with what the first layer makes of every token
    worked out beforehand."""

    def __init__(self, head: AcceptanceHead, embed: Callable[[Tensor], Tensor] | None):
        config = head.config
        size, inner, count = config.hidden_size, config.inner_size, len(config.features)
        self._embed = embed if config.state == "before" else None
        x, given, z = torch.empty(inner + count), torch.empty(size + count), torch.empty(inner)
        # Views of the same memory: what the blocks work on, and behind it what goes straight to the logit.
        self._x, self._direct, self._out_of = x.numpy()[:inner], x.numpy()[inner:], x.numpy()
        self._inner, self._z = z, z.numpy()
        self._state, self._values = given.numpy()[:size], given.numpy()[size:]
        self._join: Callable[[], object] | None = None
        if head.join is not None:
            # Columns of the state, of the token's embedding where it is read, of the features.
            weight, self._bias = head.join.weight.detach().float(), head.join.bias.detach().float()
            features = weight.shape[1] - count
            self._join = product(torch.cat([weight[:, :size], weight[:, features:]], 1), given, x[:inner])
            self._of_token = weight[:, size:features]
        linears: list = [block.linear for block in head.blocks]
        self._blocks = [
            (product(linear.weight.detach(), x[:inner], z), linear.bias.detach().numpy()) for linear in linears
        ]
        direct = [head.direct.weight.detach()[0]] if head.direct is not None else []
        self._weights = torch.cat([head.out.weight.detach()[0], *direct]).numpy()
        self._shift = head.out.bias.item()
        self._table: Any = None

    def __call__(self, view: DraftView, values: list[float]) -> float:
        """values: the head's features of the token that is asked about."""
        x, z = self._x, self._z
        hidden = wide(view.states).numpy()[-1]
        if self._join is None:
            x[:] = hidden
        else:
            self._state[:] = hidden
            if values:
                self._values[:] = self._direct[:] = values
            self._join()
            x += self._by_token(view) if self._table is None else self._table[view.token]
        for multiply, bias in self._blocks:
            multiply()
            z += bias
            F.silu(self._inner, inplace=True)
            x += z
        return float(self._weights.dot(self._out_of)) + self._shift

    def _by_token(self, view: DraftView) -> Any:
        """The part of the first layer that the token decides, its bias included, [H]."""
        if self._embed is None:
            return self._bias.numpy()
        vocabulary = view.logits.shape[-1]
        if vocabulary * len(self._bias) > LARGEST_TABLE:
            return torch.addmv(self._bias, self._of_token, self._embed(torch.tensor(view.token)).float()).numpy()
        embeds = self._embed(torch.arange(vocabulary)).float()
        self._table = torch.addmm(self._bias, embeds, self._of_token.T).numpy()
        return self._table[view.token]


def product(weight: Tensor, x: Tensor, out: Tensor) -> Callable[[], object]:
    """What writes weight [m, n] x into `out`, again and again."""
    if weight.numel() < 8192:  # from there on numpy's may start threads, whatever torch was told
        return partial(weight.contiguous().numpy().dot, x.numpy(), out=out.numpy())
    return partial(torch.mv, weight.contiguous(), x, out=out)

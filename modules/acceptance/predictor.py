"""What an acceptance head says of drafted tokens while decoding, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from operator import mul
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead, Feature
from draftsmith.modules.acceptance.policies import TrainedPredictor
from draftsmith.modules.acceptance.repeats import RepeatScores
from draftsmith.modules.decoding.confidence import (
    MAX_LOGIT,
    TokenConfidence,
    confidence_of,
    log_odds,
    log_q_of,
    sigmoid,
)
from draftsmith.modules.decoding.protocols import DraftedStep, DraftView
from draftsmith.modules.finite import NonFinite

LARGEST_TABLE = 2**24  # numbers, 64 MiB: of what a first layer makes of every token, worked out beforehand
CACHED = 2**14  # numbers of a matrix that the processor's caches keep, whatever a drafter reads in between
LARGEST_PART = 2304 * 4  # numbers of a matrix from which on OpenBLAS takes threads

# `head.FEATURE_VALUES` of the token shown; what is given last looks for repetitions, for those that need it.
READ: dict[Feature, Callable[[DraftView, TokenConfidence, Any], float]] = {
    "log_q": lambda view, known, repeats: max(known.log_q, -MAX_LOGIT),
    "logit_q": lambda view, known, repeats: log_odds(known.log_q),
    "logit_max_q": lambda view, known, repeats: log_odds(known.log_max_q),
    "entropy": lambda view, known, repeats: known.entropy,
    "depth": lambda view, known, repeats: math.log(view.num_drafted),
    "temperature": lambda view, known, repeats: view.temperature,
    "repeat": lambda view, known, repeats: repeats.score(view),
    "repeat_mean": lambda view, known, repeats: repeats.mean(view),
}
UNKNOWN = TokenConfidence(math.nan, math.nan, math.nan)
OF_DISTRIBUTION: frozenset[Feature] = frozenset(("log_q", "logit_q", "logit_max_q", "entropy"))


def num_parts(size: int, width: int) -> int:
    """Into how many groups of columns NumPy is to be given a matrix [size, width] to multiply a row with; 0: torch is
    to do it.

    Products are torch's, which keeps to its number of threads, while the matrix stays in the processor's caches. Where
    it does not, NumPy's BLAS takes two thirds of the time; but OpenBLAS would take threads of its own, for anything but
    matrices of less than 2304 * 4 numbers (its interface/gemv.c)."""
    if size * width <= CACHED:
        return 0
    return next((n for n in range(1, width + 1) if width % n == 0 and size * (width // n) < LARGEST_PART), 0)


class RectifiedLayer:
    """w . relu(A s + t[y]) of a drafted token y and the state s that predicted it, in three calls: A s, its maximum
    with -t[y], and the product with w. For relu(a + t) = max(a, -t) + t, and w . t[y] is known beforehand."""

    def __init__(self, of_state: Tensor, out: Tensor, parts: Callable[[Tensor], Tensor], vocabulary: int):
        """of_state: A, [H, W]. out: w, [W]. parts: t of tokens [N], [N, W]."""
        (size, width), on_cpu = of_state.shape, of_state.device.type == "cpu"
        self._of_state, self._out, self._parts = of_state, out[:, None].contiguous(), parts
        # In n groups [n, H, W / n] where NumPy is to multiply with it; it also has less between a call and the work.
        groups = num_parts(size, width) if on_cpu else 0
        self._columns: Any = of_state.view(size, groups, -1).transpose(0, 1).contiguous().numpy() if groups else None
        self._array: Any = out.numpy() if groups else None
        self._table = self._read(torch.arange(vocabulary)) if vocabulary * width <= LARGEST_TABLE else None

    def _read(self, tokens: Tensor) -> tuple[Any, list[float]]:
        """-t of tokens [N], [W] or [1, W] each, and w . t of each."""
        parts = self._parts(tokens)
        floors = (-parts).split(1) if self._columns is None else (-parts).numpy()
        return floors, (parts @ self._out)[:, 0].tolist()

    def logit(self, states: Tensor, token: int) -> float:
        """states [1, H], float32."""
        if self._table is None:
            (floor,), (shift,) = self._read(torch.tensor([token]))
        else:
            floors, shifts = self._table
            floor, shift = floors[token], shifts[token]
        if self._columns is None:
            return torch.mm(torch.maximum(torch.mm(states, self._of_state), floor), self._out).item() + shift
        return (states.numpy() @ self._columns).reshape(-1).clip(floor, None).dot(self._array).item() + shift


@dataclass(eq=False)
class Made:
    """What is made of a head's weights when it is first needed, once for all rows: a layer's short way, or a table by
    token of what the first layer makes of it."""

    layer: RectifiedLayer | None = None
    table: Any = None


class HeadPredictor(TrainedPredictor):
    """P^ of drafted tokens by an acceptance head, one by one while decoding.

    A draft waits for it, and calls are what it takes. So standardisation and calibration are in the weights, what the
    first layer makes of every token is worked out beforehand where the vocabulary is not too large, and heads as
    `train acceptance` makes them by default go a short way of their own (`RectifiedLayer`). Rows that draft together
    are predicted for together.
    """

    learns = False

    def __init__(self, head: AcceptanceHead, embed: Callable[[Tensor], Tensor] | None = None, calibrated: bool = True):
        """embed: the drafter's token embeddings, for a head that reads the state before the token. calibrated: the
        probability; else the raw output, which the paper's threshold is for."""
        config, head = head.config, head.folded()
        assert embed is not None or not config.reads_token
        self.late, names = config.late, config.features
        self._embed = embed if config.reads_token else None
        self._read = [READ[name] for name in names]
        self._of_distribution = not OF_DISTRIBUTION.isdisjoint(names)
        self._asked: Literal["token", "mode", "entropy"] = (
            "entropy" if "entropy" in names else "mode" if "logit_max_q" in names else "token"
        )
        self._of_state: Tensor | None = None
        self._of_numbers: Tensor | None = None
        self._array: Callable[[Tensor], Any] = Tensor.detach if head.out.weight.is_cuda else Tensor.numpy
        if head.join is not None:
            # Columns of the state, of the token's embedding where it is read, of the features where they join.
            embedded = config.hidden_size * (1 + config.reads_token)
            weight, self._bias = head.join.weight.detach(), head.join.bias.detach()
            self._of_state = weight[:, : config.hidden_size].T.contiguous()  # [H, W]: a row by it has less before it
            self._of_token = weight[:, config.hidden_size : embedded]
            self._of_numbers = weight[:, embedded:] if embedded < weight.shape[1] else None
        self._rectified = config.activation == "relu"
        linears: list = [block.linear for block in head.blocks]
        self._blocks = [(linear.weight.detach(), linear.bias.detach()) for linear in linears]
        shift = head.calibrated(0.0) if calibrated else 0.0
        scale = head.calibrated(1.0) - shift if calibrated else 1.0
        out, self._shift = scale * head.out.weight.detach()[0], scale * head.out.bias.item() + shift
        self._weight, self._out = out, self._array(out)
        self._direct: list[float] = [] if head.direct is None else (scale * head.direct.weight[0]).tolist()
        weights = dict(zip(names, self._direct, strict=True))
        self._cheap = tuple(weights.pop(n, 0.0) for n in ("log_q", "logit_q", "depth", "temperature", "repeat"))
        self._dear = [(READ[name], weight) for name, weight in weights.items()]
        self._short = self._rectified and self._embed is not None and not self._blocks
        self._made = Made()
        self._before: list[float] = []  # of a late one: features of the token that it speaks of next
        self.repeats = RepeatScores() if {"repeat", "repeat_mean"} & {*names} else None

    def beside(self) -> HeadPredictor:
        """One for another draft at the same time; it shares the head's weights and what was made of them."""
        other = copy(self)
        other._before, other.repeats = [], RepeatScores() if self.repeats is not None else None
        return other

    def reset(self) -> None:
        if self.repeats is not None:
            self.repeats.reset()

    def start_round(self) -> None:
        self._before = []

    def prob(self, view: DraftView) -> float:
        """Probability of the token shown; of a `late` one that of the one before it, and 1 where there is none.

        Raises:
            NonFinite: the head's output.
        """
        return sigmoid(self.logit(view))

    def logit(self, view: DraftView) -> float:
        """Log-odds of `prob`."""
        layer = self._made.layer
        if self._short and view.step is not None:
            logit = view.step.once(self._made, self._of_rows)[view.place] + self._direct_part(view)
        elif layer is not None:
            logit = self._shift + layer.logit(view.states, view.token) + self._direct_part(view)
        elif self._short and view.states.dtype == torch.float32:
            assert self._of_state is not None and len(view.states) == 1
            self._made.layer = RectifiedLayer(self._of_state, self._weight, self._token_parts, view.logits.shape[-1])
            return self.logit(view)
        else:
            values = self._features(view) if self._read else []
            if self.late and view.num_drafted == 1:
                return math.inf
            logit = self._logit(view, values)
        if not math.isfinite(logit):
            raise NonFinite("output", "acceptance", -2 if self.late else -1)  # of the last token but one, or the last
        return logit

    def _direct_part(self, view: DraftView) -> float:
        """The features by their weights, with fewer calls than one for each."""
        log_q, logit_q, depth, temperature, repeat = self._cheap
        part = depth * math.log(view.num_drafted) + temperature * view.temperature
        if self._of_distribution:
            own = log_q_of(view)
            part += log_q * (-MAX_LOGIT if own < -MAX_LOGIT else own) + logit_q * log_odds(own)
        if self.repeats is not None:
            part += repeat * self.repeats.score(view)
        if self._dear:
            known = confidence_of(view, self._asked) if self._of_distribution else UNKNOWN
            part += sum([weight * read(view, known, self.repeats) for read, weight in self._dear])
        return part

    def _features(self, view: DraftView) -> list[float]:
        """`FEATURE_VALUES` of the token that is asked about."""
        known = confidence_of(view, self._asked) if self._of_distribution else UNKNOWN
        values = [read(view, known, self.repeats) for read in self._read]
        if self.late:
            values, self._before = self._before, values
        return values

    def _logit(self, view: DraftView, values: list[float]) -> float:
        """values: the head's features of the token that is asked about."""
        direct = sum(map(mul, self._direct, values))
        if view.step is not None and self._of_numbers is None:
            return view.step.once(self._made, self._of_rows)[view.place] + direct
        x = view.states.float()
        if self._of_state is not None:
            x = torch.mm(x, self._of_state)
            own = self._array(x)[0]
            own += self._token_part(view) if self._made.table is None else self._made.table[view.token]
            if self._of_numbers is not None:
                own += self._array(torch.mv(self._of_numbers, torch.tensor(values, device=x.device)))
        x = self._behind_first(x)
        return float(self._out.dot(self._array(x)[0])) + self._shift + direct

    def _behind_first(self, x: Tensor) -> Tensor:
        """What the output layer reads, of what the first layer gives."""
        if self._rectified:
            x.relu_()
        for weight, bias in self._blocks:
            x = x + F.silu(F.linear(x, weight, bias))
        return x

    def _of_rows(self, step: DraftedStep) -> list[float]:
        """`_logit` of all rows of a step, but for the direct features; without those that join the first layer."""
        x = step.states.float()
        if self._of_state is not None:
            x = torch.mm(x, self._of_state).add_(self._bias if self._embed is None else self._token_parts(step.tokens))
        x = self._behind_first(x)
        return (torch.mv(x, self._weight) + self._shift).tolist()

    def _token_part(self, view: DraftView) -> Any:
        """The part of the first layer that the token decides, its bias included, [W]."""
        vocabulary = view.logits.shape[-1]
        if self._embed is None:
            return self._array(self._bias)
        if vocabulary * len(self._bias) > LARGEST_TABLE:
            return self._array(self._token_parts(torch.tensor([view.token])))[0]
        self._made.table = self._array(self._token_parts(torch.arange(vocabulary)))
        return self._made.table[view.token]

    def _token_parts(self, tokens: Tensor) -> Tensor:
        """The same of tokens [N], [N, W]."""
        assert self._embed is not None
        embeds = self._embed(tokens.to(self._bias.device)).float()
        return torch.addmm(self._bias, embeds, self._of_token.T)

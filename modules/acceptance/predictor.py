"""What an acceptance head says of drafted tokens while decoding, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from operator import mul
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead, Feature
from draftsmith.modules.acceptance.policies import TrainedPredictor
from draftsmith.modules.acceptance.repeats import RepeatScores
from draftsmith.modules.decoding.confidence import MAX_LOGIT, TokenConfidence, confidence_of, log_odds, sigmoid
from draftsmith.modules.decoding.protocols import DraftView
from draftsmith.modules.finite import NonFinite

LARGEST_TABLE = 2**24  # numbers, 64 MiB: of what a first layer makes of every token, worked out beforehand

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


class HeadPredictor(TrainedPredictor):
    """P^ of drafted tokens by an acceptance head, one by one while decoding.

    A draft waits for it, and calls are what it takes. So standardisation and calibration are in the weights, what the
    first layer makes of every token is worked out beforehand where the vocabulary is not too large, and on a CPU the
    small sums are NumPy's, on the memory of torch's tensors: it has less between a call and the work. Products are
    torch's, which keeps to its number of threads.
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
        self._out, self._shift = self._array(scale * head.out.weight.detach()[0]), scale * head.out.bias.item() + shift
        self._direct: list[float] = [] if head.direct is None else (scale * head.direct.weight[0]).tolist()
        self._table: Any = None
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
        values = self._features(view) if self._read else []
        if self.late and view.num_drafted == 1:
            return math.inf
        logit = self._logit(view, values)
        if not math.isfinite(logit):
            raise NonFinite("output", "acceptance", -2 if self.late else -1)  # of the last token but one, or the last
        return logit

    def _features(self, view: DraftView) -> list[float]:
        """`FEATURE_VALUES` of the token that is asked about."""
        known = confidence_of(view, self._asked) if self._of_distribution else UNKNOWN
        values = [read(view, known, self.repeats) for read in self._read]
        if self.late:
            values, self._before = self._before, values
        return values

    def _logit(self, view: DraftView, values: list[float]) -> float:
        """values: the head's features of the token that is asked about."""
        x = view.states.float()  # of one token, but for those who hand in more: the last one counts
        if self._of_state is not None:
            x = torch.mm(x, self._of_state)
            own = self._array(x)[-1]
            own += self._token_part(view) if self._table is None else self._table[view.token]
            if self._of_numbers is not None:
                own += self._array(torch.mv(self._of_numbers, torch.tensor(values, device=x.device)))
            if self._rectified:
                x.relu_()
        for weight, bias in self._blocks:
            x = x + F.silu(F.linear(x, weight, bias))
        return float(self._out.dot(self._array(x)[-1])) + self._shift + sum(map(mul, self._direct, values))

    def _token_part(self, view: DraftView) -> Any:
        """The part of the first layer that the token decides, its bias included, [W]."""
        if self._table is None:
            vocabulary, device = view.logits.shape[-1], self._bias.device
            if self._embed is None:
                return self._array(self._bias)
            if vocabulary * len(self._bias) > LARGEST_TABLE:
                token = torch.tensor(view.token, device=device)
                return self._array(torch.addmv(self._bias, self._of_token, self._embed(token).float()))
            embeds = self._embed(torch.arange(vocabulary, device=device)).float()
            self._table = self._array(torch.addmm(self._bias, embeds, self._of_token.T))
        return self._table[view.token]

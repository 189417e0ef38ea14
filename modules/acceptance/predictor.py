"""What an acceptance head says of drafted tokens while decoding, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead, Feature
from draftsmith.modules.acceptance.policies import Predictor
from draftsmith.modules.acceptance.repeats import RepeatScores
from draftsmith.modules.decoding.confidence import MAX_LOGIT, confidence_of, log_odds, sigmoid
from draftsmith.modules.decoding.protocols import DraftView
from draftsmith.modules.finite import NonFinite

LARGEST_TABLE = 2**24  # numbers, 64 MiB: of what a first layer makes of every token, worked out beforehand


class HeadPredictor(Predictor):
    """P^ of drafted tokens by an acceptance head, one by one while decoding: the head's arithmetic in few calls, with
    what the first layer makes of every token worked out beforehand where the vocabulary is not too large."""

    learns = False

    def __init__(self, head: AcceptanceHead, embed: Callable[[Tensor], Tensor] | None = None, calibrated: bool = True):
        """embed: the drafter's token embeddings, for a head that reads the state before the token. calibrated: the
        probability; else the raw output, which the paper's threshold is for."""
        config = head.config
        assert config.late or embed is not None
        self.late, self._names = config.late, config.features
        self._embed = None if config.late else embed
        self._first: Tensor | None = None
        if head.join is not None:
            # Columns of the state, of the token's embedding where it is read, of the features.
            weight, self._bias = head.join.weight.detach(), head.join.bias.detach()
            features = weight.shape[1] - len(config.features)
            self._first = torch.cat([weight[:, : config.hidden_size], weight[:, features:]], 1)
            self._of_token = weight[:, config.hidden_size : features]
        linears: list = [block.linear for block in head.blocks]
        self._blocks = [(linear.weight.detach(), linear.bias.detach()) for linear in linears]
        self._out, self._shift = head.out.weight.detach()[0], head.out.bias.item()
        self._direct: list[float] = [] if head.direct is None else head.direct.weight[0].tolist()
        self._table: Tensor | None = None
        self._calibrated = head.calibrated if calibrated else None
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
        return sigmoid(logit if self._calibrated is None else self._calibrated(logit))

    def _features(self, view: DraftView) -> list[float]:
        """`FEATURE_VALUES` of the token that is asked about."""
        if not self._names:
            return []
        known = confidence_of(view)
        found: dict[Feature, float] = {
            "log_q": max(known.log_q, -MAX_LOGIT),
            "logit_q": log_odds(known.log_q),
            "logit_max_q": log_odds(known.log_max_q),
            "entropy": known.entropy,
            "depth": math.log(view.num_drafted),
            "temperature": view.temperature,
            "repeat": 0.0 if self._repeats is None else self._repeats.score(view),
        }
        values = [found[name] for name in self._names]
        if self.late:
            values, self._before = self._before, values
        return values

    def _logit(self, view: DraftView, values: list[float]) -> float:
        """The raw logit. values: the head's features of the token that is asked about."""
        x = view.hidden.float()
        if self._first is not None:
            given = torch.cat([x, torch.tensor(values, device=x.device)]) if values else x
            x = torch.addmv(self._token_part(view), self._first, given)
        for weight, bias in self._blocks:
            x = x + F.silu(torch.addmv(bias, weight, x))
        return self._out.dot(x).item() + self._shift + sum(map(mul, self._direct, values))

    def _token_part(self, view: DraftView) -> Tensor:
        """The part of the first layer that the token decides, its bias included, [W]."""
        if self._embed is None:
            return self._bias
        if self._table is None:
            vocabulary, device = view.logits.shape[-1], self._bias.device
            if vocabulary * len(self._bias) > LARGEST_TABLE:
                token = torch.tensor(view.token, device=device)
                return torch.addmv(self._bias, self._of_token, self._embed(token).float())
            embeds = self._embed(torch.arange(vocabulary, device=device)).float()
            self._table = torch.addmm(self._bias, embeds, self._of_token.T)
        return self._table[view.token]

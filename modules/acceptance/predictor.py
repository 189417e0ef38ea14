"""Predictions of an acceptance head for drafted tokens, one by one while decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.acceptance.head import FEATURES, AcceptanceHead
from draftsmith.modules.acceptance.repeats import RepeatIndex
from draftsmith.modules.decoding.confidence import confidence_of, sigmoid
from draftsmith.modules.decoding.stop import DraftView, Predictor
from draftsmith.modules.finite import NonFinite

# Numbers (64 MiB) of the largest table that holds the first layer's part of every token.
LARGEST_TABLE = 2**24

# The most expensive number that each feature reads (`confidence_of`), the most expensive feature first.
NEEDS = {"entropy": "entropy", "logit_max_q": "mode", "logit_q": "token", "log_q": "token"}


class HeadPredictor(Predictor):
    """P(a drafted token is accepted) by an acceptance head.

    The draft waits for every prediction, so standardization and calibration are folded into the weights, the part of
    the first layer that only depends on the token is looked up in a table unless the vocabulary is too large, and rows
    that draft together are predicted together.
    """

    learns = False

    def __init__(self, head: AcceptanceHead, embed: Callable[[Tensor], Tensor] | None = None, calibrated: bool = True):
        """embed: token embeddings of the drafter, for a head that reads the state before the token. calibrated: predict
        the probability; else the raw output, which the paper's threshold is for."""
        config, head = head.config, head.folded()
        assert embed is not None or not config.reads_token
        self.late, self._embed = config.late, embed if config.reads_token else None
        names = config.features
        self._features = [FEATURES[name] for name in names]
        self._need = next((need for name, need in NEEDS.items() if name in names), "nothing")
        self._of_state: Tensor | None = None
        self._of_numbers: Tensor | None = None
        if head.join is not None:
            # Columns of the join: state, embedding if it is read, features if they join.
            embedded = config.hidden_size * (1 + config.reads_token)
            weight, self._bias = head.join.weight.detach(), head.join.bias.detach()
            self._of_state = weight[:, : config.hidden_size].T.contiguous()  # [H, W]
            self._of_token = weight[:, config.hidden_size : embedded].T  # [H, W]
            self._of_numbers = weight[:, embedded:].T if embedded < weight.shape[1] else None  # [F, W]
        self._rectified = config.activation == "relu"
        linears: list = [block.linear for block in head.blocks]
        self._blocks = [(linear.weight.detach(), linear.bias.detach()) for linear in linears]
        # Calibration is affine: fold it into the output weights.
        shift = head.calibrated(0.0) if calibrated else 0.0
        scale = head.calibrated(1.0) - shift if calibrated else 1.0
        self._out, self._shift = scale * head.out.weight.detach()[0], scale * head.out.bias.item() + shift
        self._direct: list[float] = [] if head.direct is None else (scale * head.direct.weight[0]).tolist()
        # Shared by rows (`for_row`): the table of token parts, which is filled when the vocabulary is known.
        self._shared: dict[str, Tensor] = {}
        # Of a late head: features of the token that it predicts next.
        self._before: list[float] = []
        self._repeats = RepeatIndex() if "repeat" in names else None

    def for_row(self) -> HeadPredictor:
        """Return a predictor for another row, which shares the weights and the table."""
        other = copy(self)
        other._before, other._repeats = [], RepeatIndex() if self._repeats is not None else None
        return other

    def reset(self) -> None:
        if self._repeats is not None:
            self._repeats.reset()

    def start_round(self) -> None:
        self._before = []

    def prob(self, view: DraftView) -> float:
        """Return the probability of the token shown; of a `late` head that of the token before it, 1 if there is none.

        Raises:
            NonFinite: the head's output is not finite.
        """
        return sigmoid(self.logit(view))

    def logit(self, view: DraftView) -> float:
        """Return the log-odds of `prob`; infinite if there is no token to predict yet."""
        features: list[float] = []
        if self._features:
            known = confidence_of(view, self._need)
            if self._repeats is not None:
                known = known._replace(repeat=self._repeats.score(view))
            features = [feature(known) for feature in self._features]
        if self.late:
            # This state has read the token before: predict that one.
            features, self._before = self._before, features
            if view.num_drafted == 1:
                return math.inf

        vocabulary = view.logits.shape[-1]
        # Features in the first layer belong to one row: such heads predict row by row.
        if view.batch is None or self._of_numbers is not None:
            logit = self._logits(view.states, [view.token], vocabulary, features)[0]
        else:
            rows = view.batch.once(id(self._shared), lambda own: self._logits(own.states, own.drafted, vocabulary))
            logit = rows[view.place]
        logit += sum(map(mul, self._direct, features))
        if not math.isfinite(logit):
            # Of the last token but one, or the last.
            raise NonFinite("output", "acceptance", -2 if self.late else -1)
        return logit

    def _logits(
        self, states: Tensor, tokens: Sequence[int], vocabulary: int, features: Sequence[float] = ()
    ) -> list[float]:
        """Return log-odds of R rows, without the direct part of their features. states: [R, H]."""
        x = states.float()  # [R, H]
        if self._of_state is not None:
            x = torch.addmm(self._token_part(tokens, vocabulary), x, self._of_state)  # [R, W]
            if self._of_numbers is not None:
                x += torch.tensor(features, device=x.device) @ self._of_numbers
        if self._rectified:
            x.relu_()
        for weight, bias in self._blocks:
            x = x + F.silu(F.linear(x, weight, bias))
        return [logit + self._shift for logit in torch.mv(x, self._out).tolist()]

    def _token_part(self, tokens: Sequence[int], vocabulary: int) -> Tensor:
        """Return the part of the first layer that the tokens decide, its bias included: [R, W], or [W] for any."""
        if self._embed is None:
            return self._bias
        if vocabulary * len(self._bias) > LARGEST_TABLE:
            # Too many tokens for a table: multiply each embedding.
            ids = torch.tensor(tokens, device=self._bias.device)
            return torch.addmm(self._bias, self._embed(ids).float(), self._of_token)
        table = self._shared.get("table")
        if table is None:
            ids = torch.arange(vocabulary, device=self._bias.device)
            table = torch.addmm(self._bias, self._embed(ids).float(), self._of_token)  # [V, W]
            self._shared["table"] = table
        return table[tokens[0]] if len(tokens) == 1 else table[[*tokens]]

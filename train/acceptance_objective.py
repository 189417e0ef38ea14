"""What an acceptance head learns (SpecDec++ section 3.3): a frozen drafter gives the states that it reads."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.modules.acceptance.fitting import predicted
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, acceptance_training
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.metrics import acceptance_metrics, expected_calibration_error, fit_platt
from draftsmith.modules.types import AcceptanceBatch, InputError, LossOutput
from draftsmith.train.data_module import Part
from draftsmith.train.drafted_tokens import DraftedTokens
from draftsmith.train.lit_head import Given, Objective
from draftsmith.train.metrics import gather_rows
from draftsmith.train.stored_tokens import StateReader

Calibrate = Literal["platt", "none"]


class AcceptanceObjective(Objective):
    """Parts hold what `reader` reads (drafted_tokens.py)."""

    monitor, larger_is_better = "kl", False

    def __init__(self, reader: StateReader, calibrate: Calibrate):
        """calibrate: what is fitted to the validation tokens, each time they are predicted."""
        self.reader, self.calibrate, self.model = reader, calibrate, reader.model
        # A head for real rounds begins as a logistic, which may stay the best.
        self.validates_first = reader.weighted

    def state(self, head: AcceptanceHead) -> dict[str, Any]:
        return {"calibration": list(head.config.calibration)}

    def load(self, head: AcceptanceHead, checkpoint: Mapping[str, Any]) -> None:
        scale, shift = checkpoint["calibration"]
        head.config = dataclasses.replace(head.config, calibration=(scale, shift))

    def read(self, part: Part, validating: bool = False) -> Given:
        tokens = self.reader.read(part.data, with_log_q=validating)
        return Given(tokens, tokens.batch.hidden)

    def loss(self, head: AcceptanceHead, given: Given, step: TrainStep) -> LossOutput:
        batch = given.data.batch
        return acceptance_loss(predicted(head, batch), batch, head.config.w_acc, head.config.w_rej)

    def flops(self, head: AcceptanceHead, part: Part, step: TrainStep) -> float:
        read, tokens = self.reader.flops(part, step.lengths)
        return read + acceptance_training(head.config, tokens)

    def validate(self, head: AcceptanceHead, given: Iterable[tuple[Part, Given]]) -> dict[str, float]:
        """kl, brier, ece, auc and auc_q over the drafted tokens, by the probability that the loss' weights imply; and
        loss, the weighted loss. Tokens of rollouts count by their weights in all of them.

        With `calibrate`, ece_platt as well, by 2-fold cross-fitting over samples; the head keeps the fit to all of
        them.
        """
        rows = self._tokens(head, given)
        if not len(rows):
            raise InputError("val", "no drafted token", "validation samples with a response", "Hold out more samples.")
        raw, accept_prob, log_q, sample, *weights = rows.unbind(1)
        weight = weights[0] if weights else None
        plain = dataclasses.replace(head.config, calibration=(1.0, 0.0))
        head.config = plain
        logit = head.corrected(raw)
        metrics = acceptance_metrics(logit, accept_prob, log_q, weight)
        everything = AcceptanceBatch(raw, accept_prob, torch.ones_like(raw, dtype=torch.bool), weight)
        metrics["loss"] = float(acceptance_loss(raw, everything, plain.w_acc, plain.w_rej).loss)
        if self.calibrate != "none":
            metrics[f"ece_{self.calibrate}"] = self._cross_fitted_ece(head, raw, accept_prob, sample, weight)
            head.config = fitted(plain, logit, accept_prob, weight)
        return metrics

    def _tokens(self, head: AcceptanceHead, given: Iterable[tuple[Part, Given]]) -> Tensor:
        """[N, 4] of all ranks: raw logit, accept_prob, log_q and sample number of every drafted token; [N, 5] where
        tokens have weights."""
        device = next(head.parameters()).device
        rows = [torch.empty(0, 4 + self.reader.weighted, device=device)]
        for part, own in given:
            tokens: DraftedTokens = own.data
            batch, log_q = tokens.batch, tokens.log_q
            assert log_q is not None
            sample = torch.tensor([key.index for key in part.keys], device=device)[tokens.row]
            columns = [predicted(head, batch), batch.accept_prob, log_q, sample]
            columns += [batch.weight] if batch.weight is not None else []
            rows.append(torch.stack([column.float() for column in columns], dim=1))
        return gather_rows(torch.cat(rows))

    def _cross_fitted_ece(
        self, trained: AcceptanceHead, raw: Tensor, accept_prob: Tensor, sample: Tensor, weight: Tensor | None
    ) -> float:
        """ECE of the calibration, each half of the samples predicted by the fit to the other half."""
        head = copy.copy(trained)  # the same weights, under settings of its own
        logit, calibrated = head.corrected(raw), torch.empty_like(raw)
        for half in (0, 1):
            own = sample % 2 == half
            if own.all() or not own.any():  # one sample: nothing to fit on
                return float("nan")
            others = None if weight is None else weight[~own]
            head.config = fitted(trained.config, logit[~own], accept_prob[~own], others)
            calibrated[own] = head.calibrated(raw[own])
        return float(expected_calibration_error(torch.sigmoid(calibrated.double()), accept_prob, weight=weight))


def fitted(
    config: AcceptanceHeadConfig, logit: Tensor, accept_prob: Tensor, weight: Tensor | None
) -> AcceptanceHeadConfig:
    """Settings with the scale and shift that fit corrected logits [N] to labels [N]."""
    return dataclasses.replace(config, calibration=fit_platt(logit, accept_prob, weight=weight))

"""Training of the acceptance head (SpecDec++ section 3.3): a frozen drafter gives the states it judges by."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.flops import acceptance_training
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.metrics import acceptance_metrics, expected_calibration_error, fit_isotonic, fit_platt
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import AcceptanceBatch, InputError, LossOutput
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.data_module import Part, move
from draftsmith.train.drafted_tokens import Reader
from draftsmith.train.lit_head import LitHead
from draftsmith.train.metrics import gather_rows

Calibrate = Literal["platt", "isotonic", "none"]


class LitAcceptance(LitHead):
    """parts hold what `reader` reads (drafted_tokens.py)."""

    monitor, larger_is_better = "kl", False
    head: AcceptanceHead

    def __init__(self, head: AcceptanceHead, reader: Reader, config: TrainAcceptanceConfig, total_steps: int):
        """config.calibrate: what is fitted to the validation tokens, each time they are judged."""
        super().__init__(head, config, total_steps)
        self.reader = reader
        self.calibrate: Calibrate = config.calibrate

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["calibration"] = list(self.head.config.calibration)
        checkpoint["knots"] = [list(knot) for knot in self.head.config.knots]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        scale, shift = checkpoint["calibration"]
        knots = tuple((x, y) for x, y in checkpoint["knots"])
        self.head.config = dataclasses.replace(self.head.config, calibration=(scale, shift), knots=knots)

    @property
    def frozen(self) -> CausalLM:
        """The model whose hidden states the head reads, or which the EAGLE head that it reads drafts for."""
        return self.reader.lm

    def judge(self, batch: AcceptanceBatch) -> Tensor:
        """Raw logits, in float32 also where the rest runs under bf16 autocast."""
        with torch.autocast(batch.hidden.device.type, enabled=False):
            return self.head(batch.hidden, batch.embeds, batch.features)

    def loss(self, part: Part, epoch_noise: bool) -> LossOutput:
        batch, config = self.reader.read(part.data).batch, self.head.config
        self.bad_steps.given(self.reader.model, batch.hidden)
        return acceptance_loss(self.judge(batch), batch, config.w_acc, config.w_rej)

    def flops(self, part: Part) -> float:
        read, judged = self.reader.flops(part, self.lengths_of(part))
        return read + acceptance_training(self.head.config, judged)

    @torch.no_grad()
    def validate(self, parts: Iterable[Part]) -> dict[str, float]:
        """kl, brier, ece, auc and auc_q over the drafted tokens, by the probability that the loss' weights imply; and
        loss, the weighted loss. Tokens of rollouts count by their weights in all of them.

        With `calibrate`, ece_platt or ece_isotonic as well, by 2-fold cross-fitting over samples; the head keeps the
        fit to all of them.
        """
        rows = self._tokens(parts)
        if not len(rows):
            raise InputError("val", "no drafted token", "validation samples with a response", "Hold out more samples.")
        raw, accept_prob, log_q, sample, *weights = rows.unbind(1)
        weight = weights[0] if weights else None
        plain = uncalibrated(self.head.config)
        self.head.config = plain
        logit = self.head.corrected(raw)
        metrics = acceptance_metrics(logit, accept_prob, log_q, weight)
        everything = AcceptanceBatch(raw, accept_prob, torch.ones_like(raw, dtype=torch.bool), weight)
        metrics["loss"] = float(acceptance_loss(raw, everything, plain.w_acc, plain.w_rej).loss)
        if self.calibrate != "none":
            metrics[f"ece_{self.calibrate}"] = self._cross_fitted_ece(raw, accept_prob, sample, weight)
            self.head.config = fitted(plain, self.calibrate, logit, accept_prob, weight)
        return metrics

    def _tokens(self, parts: Iterable[Part]) -> Tensor:
        """[N, 4] of all ranks: raw logit, accept_prob, log_q and sample number of every drafted token; [N, 5] where
        tokens have weights."""
        rows = []
        for part in parts:
            part = move(part, self.device)
            tokens = self.reader.read(part.data, with_log_q=True)
            batch, log_q = tokens.batch, tokens.log_q
            self.check_given(self.reader.model, part, batch.hidden)
            assert log_q is not None
            sample = torch.tensor([key.index for key in part.keys], device=self.device)[tokens.row]
            columns = [self.judge(batch), batch.accept_prob, log_q, sample]
            columns += [batch.weight] if batch.weight is not None else []
            rows.append(torch.stack([column.float() for column in columns], dim=1))
        none = torch.empty(0, 4 + self.reader.weighted, device=self.device)
        return gather_rows(torch.cat([none, *rows]))

    def _cross_fitted_ece(self, raw: Tensor, accept_prob: Tensor, sample: Tensor, weight: Tensor | None) -> float:
        """ECE of the calibration, each half of the samples judged by the fit to the other half."""
        head = copy.copy(self.head)  # the same weights, under settings of its own
        logit, calibrated = head.corrected(raw), torch.empty_like(raw)
        for half in (0, 1):
            judged = sample % 2 == half
            if judged.all() or not judged.any():  # one sample: nothing to fit on
                return float("nan")
            others = None if weight is None else weight[~judged]
            head.config = fitted(self.head.config, self.calibrate, logit[~judged], accept_prob[~judged], others)
            calibrated[judged] = head.calibrated(raw[judged])
        return float(expected_calibration_error(torch.sigmoid(calibrated.double()), accept_prob, weight=weight))


def uncalibrated(config: AcceptanceHeadConfig) -> AcceptanceHeadConfig:
    """Without a fit to held-out tokens."""
    return dataclasses.replace(config, calibration=(1.0, 0.0), knots=())


def fitted(
    config: AcceptanceHeadConfig, calibrate: Calibrate, logit: Tensor, accept_prob: Tensor, weight: Tensor | None
) -> AcceptanceHeadConfig:
    """Settings with a calibration that is fitted to corrected logits [N] and labels [N]."""
    if calibrate == "isotonic":
        return dataclasses.replace(uncalibrated(config), knots=fit_isotonic(logit, accept_prob, weight))
    return dataclasses.replace(uncalibrated(config), calibration=fit_platt(logit, accept_prob, weight=weight))

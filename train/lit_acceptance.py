"""Training of the acceptance head (SpecDec++ section 3.3): a frozen draft model gives the states it judges by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.flops import acceptance_training
from draftsmith.modules.heads.acceptance import AcceptanceHead
from draftsmith.modules.losses import acceptance_loss
from draftsmith.modules.metrics import acceptance_metrics, expected_calibration_error, fit_platt
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import AcceptanceBatch, InputError, LossOutput
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import Part, move
from draftsmith.train.lit_head import Frozen, LitHead
from draftsmith.train.metrics import gather_rows
from draftsmith.train.telemetry import features_flops


class LitAcceptance(LitHead):
    """parts hold z_ids, loss_mask, accept_prob and log_q, each [B, T] (data/datasets.py)."""

    monitor, larger_is_better = "kl", False
    head: AcceptanceHead

    def __init__(
        self, head: AcceptanceHead, draft: CausalLM, config: TrainConfig, total_steps: int, *, platt: bool, greedy: bool
    ):
        """platt: fit the head's calibration on the validation tokens, each time they are judged. greedy: the labels
        are those of greedy decoding."""
        super().__init__(head, config, total_steps)
        self.draft, self.platt, self.greedy = Frozen(draft), platt, greedy

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["calibration"] = list(self.head.config.calibration)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        scale, shift = checkpoint["calibration"]
        self.head.config = dataclasses.replace(self.head.config, calibration=(scale, shift))

    def batch_of(self, part: Part) -> AcceptanceBatch:
        """The draft reads z; its last hidden states are the head's input, made anew as z changes with the epoch."""
        data = part.data
        with torch.no_grad():
            hidden = self.draft.model.features(data.z_ids)
        return AcceptanceBatch(hidden, data.accept_prob, data.loss_mask)

    def judge(self, hidden: Tensor) -> Tensor:
        """Raw logits, in float32 also where the rest runs under bf16 autocast."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden)

    def loss(self, part: Part, epoch_noise: bool) -> LossOutput:
        batch, mask, config = self.batch_of(part), part.data.loss_mask, self.head.config
        # The head judges token by token: it is asked about those that count only.
        kept = AcceptanceBatch(batch.hidden[mask], batch.accept_prob[mask], mask[mask])
        return acceptance_loss(self.judge(kept.hidden), kept, config.w_acc, config.w_rej)

    def flops(self, part: Part) -> float:
        lengths, config = self.lengths_of(part), self.head.config
        head = acceptance_training(config.hidden_size, config.num_blocks, part.tokens)
        return features_flops(self.draft.model, lengths) + head

    def draft_log_prob(self, hidden: Tensor, z_ids: Tensor) -> Tensor:
        """Log-probability [B, T] at temperature 1 that the draft gave z_t, 0 at t = 0. For greedy labels: there q is
        one-hot, so that log q(y) is 0 for every drafted token and says nothing."""
        result = torch.zeros(z_ids.shape, device=hidden.device)
        for row in range(len(z_ids)):  # one row at a time: [T, V] is in memory, not [B, T, V]
            log_prob = self.draft.model.lm_head(hidden[row, :-1]).float().log_softmax(-1)
            result[row, 1:] = log_prob.gather(-1, z_ids[row, 1:, None])[:, 0]
        return result

    @torch.no_grad()
    def validate(self, parts: Iterable[Part]) -> dict[str, float]:
        """kl, brier, ece, auc and auc_q over the drafted tokens, by the probability that the loss' weights imply; and
        loss, the weighted loss.

        With `platt`, ece_platt as well, by 2-fold cross-fitting over samples; the head keeps the fit to all of them.
        """
        rows = self._tokens(parts)
        if not len(rows):
            raise InputError("val", "no drafted token", "validation samples with a response", "Hold out more samples.")
        raw, accept_prob, log_q, sample = rows.unbind(1)
        weights = dataclasses.replace(self.head.config, calibration=(1.0, 0.0))
        logit = self.head.corrected(raw)
        metrics = acceptance_metrics(logit, accept_prob, log_q)
        everything = AcceptanceBatch(raw[None], accept_prob[None], torch.ones_like(raw, dtype=torch.bool)[None])
        metrics["loss"] = float(acceptance_loss(raw[None], everything, weights.w_acc, weights.w_rej).loss)
        if self.platt:
            metrics["ece_platt"] = _cross_fitted_ece(logit, accept_prob, sample)
            self.head.config = dataclasses.replace(weights, calibration=fit_platt(logit, accept_prob))
        return metrics

    def _tokens(self, parts: Iterable[Part]) -> Tensor:
        """[N, 4] of all ranks: raw logit, accept_prob, log_q and sample number of every drafted token."""
        rows = [torch.empty(0, 4, device=self.device)]
        for part in parts:
            part = move(part, self.device)
            batch, mask = self.batch_of(part), part.data.loss_mask
            sample = torch.tensor([key.index for key in part.keys], device=self.device)[:, None].expand_as(mask)
            log_q = self.draft_log_prob(batch.hidden, part.data.z_ids) if self.greedy else part.data.log_q
            columns = (self.judge(batch.hidden), batch.accept_prob, log_q, sample)
            rows.append(torch.stack([column[mask].float() for column in columns], dim=1))
        return gather_rows(torch.cat(rows))


def _cross_fitted_ece(logit: Tensor, accept_prob: Tensor, sample: Tensor) -> float:
    """ECE of Platt's calibration, each half of the samples judged by the fit to the other half."""
    fitted = torch.empty_like(logit)
    for half in (0, 1):
        judged = sample % 2 == half
        if judged.all() or not judged.any():  # one sample: nothing to fit on
            return float("nan")
        scale, shift = fit_platt(logit[~judged], accept_prob[~judged])
        fitted[judged] = scale * logit[judged] + shift
    return float(expected_calibration_error(torch.sigmoid(fitted.double()), accept_prob))

"""Who predicts that a drafted token will be accepted, what they say of the tokens of recorded rounds, and how good that
is: the rows of tables and diagrams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.data.console import Column, json_values
from draftsmith.eval.replay.replay import online_features
from draftsmith.eval.replay.rollouts import ChainRollouts, Floats
from draftsmith.modules.acceptance.online_logistic import OnlineLogistic
from draftsmith.modules.acceptance.policies import ConfidenceName
from draftsmith.modules.decoding.confidence import log_odds_of
from draftsmith.modules.metrics import (
    NUM_BINS,
    binary_kl,
    brier,
    expected_calibration_error,
    fit_platt,
    soft_label_auc,
)

# Fewer tokens say too little about calibration or ranking to be printed.
MIN_TOKENS = 100
Q, MAX_Q, ENTROPY = "q(y)", "max q", "entropy"
QUALITY = (
    Column("tokens", "tokens", ",d"), Column("accepted", "accepted", ".1%"), Column("auc", "AUC", ".3f"),
    Column("brier", "Brier", ".4f"), Column("ece", "ECE", ".4f"), Column("kl", "KL (nats)", ".4f"),
)  # fmt: skip
LABELS = (
    "Labels are min(1, p(y)/q(y)), greedy 1 or 0, of drafted tokens down to and with the first rejected one of rounds "
    "that begin at every position of the target's answers. Soft labels: a perfect predictor has Brier 0 and KL 0. "
    "ECE: 15 bins of equal mass."
)


@dataclass(frozen=True)
class LabelledTokens:
    """N drafted tokens of rollouts that have a label and that every recorded head has read, in the order of rounds.

    mask [S, K]: which they are: the last token before the drafter's context ends has no state.
    """

    rollouts: ChainRollouts
    mask: NDArray[np.bool_]

    @property
    def accept_prob(self) -> Tensor:
        """[N] in [0, 1], the labels."""
        return self.of(self.rollouts.accept_prob)

    @property
    def depth(self) -> NDArray[np.int64]:
        """[N], 1 for a round's first token."""
        return np.broadcast_to(np.arange(1, self.rollouts.depth + 1), self.mask.shape)[self.mask]

    @property
    def task(self) -> NDArray[np.str_]:
        """[N]: the prompts' own."""
        tasks = np.array([self.rollouts.answers[number].task for number in self.rollouts.answer], dtype=np.str_)
        return np.broadcast_to(tasks[:, None], self.mask.shape)[self.mask]

    def of(self, values: Floats) -> Tensor:
        """[N] of values [S, K]."""
        return torch.from_numpy(np.ascontiguousarray(values[self.mask]))


def labelled_tokens(rollouts: ChainRollouts) -> LabelledTokens:
    mask = rollouts.verified()
    for logits in rollouts.heads.values():
        mask = mask & ~np.isnan(logits)
    return LabelledTokens(rollouts, mask)


@dataclass(frozen=True)
class Prediction:
    """score [N] ranks tokens, higher is likelier; prob [N] is a probability, where the predictor gives one."""

    score: Tensor
    prob: Tensor | None

    def part(self, mask: NDArray[np.bool_]) -> Prediction:
        """The prediction for the tokens [N] in the mask."""
        chosen = torch.from_numpy(mask)
        return Prediction(self.score[chosen], None if self.prob is None else self.prob[chosen])


def confidences(tokens: LabelledTokens) -> dict[str, Prediction]:
    """Predictions that read nothing but the draft's own distributions."""
    log_q, log_max_q = tokens.of(tokens.rollouts.log_q), tokens.of(tokens.rollouts.log_max_q)
    return {
        Q: Prediction(log_q, log_q.exp()),
        MAX_Q: Prediction(log_max_q, log_max_q.exp()),
        ENTROPY: Prediction(-tokens.of(tokens.rollouts.entropy), None),
    }


def probabilities_of(tokens: LabelledTokens, probs: Floats) -> Prediction:
    """A predictor's probabilities [S, K], as they are."""
    prob = tokens.of(probs)
    return Prediction(prob, prob)


def online_probs(rollouts: ChainRollouts, confidence: ConfidenceName = "max_q", repeats: bool = False) -> Floats:
    """[S, K]: P(accepted) by the online fit on the log-odds of max q, or of q(y), and on repetitions of the text, as it
    goes through the answers one after the other.

    It learns from the rounds that decoding with drafts of K tokens would run, once they are verified, and says its
    opinion at every other position in passing.
    """
    model, features = OnlineLogistic(1 + repeats), online_features(rollouts, confidence, repeats)
    labelled = rollouts.verified()
    probs = np.full(labelled.shape, np.nan)
    answer, next_start = -1, 1
    for row in range(len(features)):
        probs[row] = [model.prob(x) for x in features[row]]
        if rollouts.answer[row] != answer:
            answer, next_start = rollouts.answer[row], 1
        if rollouts.start[row] == next_start:
            accepted = int(rollouts.num_accepted[row])
            model.observe(features[row][labelled[row]].tolist(), accepted)
            next_start += accepted + 1
    return probs


def fitted_probs(rollouts: ChainRollouts, fit: ChainRollouts) -> Floats:
    """[S, K]: a logistic model of the log-odds of q(y), fitted to the labelled tokens of `fit`."""
    labelled = fit.verified()
    scale, bias = fit_platt(
        log_odds_of(torch.from_numpy(fit.log_q[labelled])), torch.from_numpy(fit.accept_prob[labelled])
    )
    return torch.sigmoid(scale * log_odds_of(torch.from_numpy(rollouts.log_q)) + bias).numpy()


def quality(score: Tensor, prob: Tensor | None, accept_prob: Tensor) -> dict[str, Any]:
    """tokens, auc, and where there is a probability brier, ece and kl [nats], all against soft labels; None where there
    are fewer than MIN_TOKENS tokens, or no probability, or where a number is not defined. All [N]."""
    numbers: dict[str, Tensor] = {}
    if len(score) >= MIN_TOKENS:
        numbers["auc"] = soft_label_auc(score, accept_prob)
        if prob is not None:
            numbers["brier"] = brier(prob, accept_prob)
            numbers["ece"] = expected_calibration_error(prob, accept_prob)
            # A softmax that rounds to 0 or 1 would cost infinitely much.
            numbers["kl"] = binary_kl(torch.logit(prob.double(), eps=1e-6), accept_prob)
    found = {name: float(value) if value.isfinite() else None for name, value in numbers.items()}
    return {"tokens": len(score), **dict.fromkeys(("auc", "brier", "ece", "kl")), **found}


def quality_rows(tokens: LabelledTokens, predictions: Mapping[str, Prediction]) -> list[dict[str, Any]]:
    """One row a predictor: its name, the mean label of the tokens, and its quality."""
    return _quality_rows(tokens.accept_prob, predictions)


def quality_by(
    tokens: LabelledTokens, predictions: Mapping[str, Prediction], key: str, shown: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """`quality_rows` of these predictors for each value of `key`, depth or task."""
    label, shown = tokens.accept_prob, list(shown)
    for value, mask in by_value(getattr(tokens, key)).items():
        own = {name: predictions[name].part(mask) for name in shown}
        yield from ({key: value, **row} for row in _quality_rows(label[torch.from_numpy(mask)], own))


def _quality_rows(label: Tensor, predictions: Mapping[str, Prediction]) -> list[dict[str, Any]]:
    accepted = label.mean() if len(label) else torch.tensor(torch.nan)
    return [
        json_values({"predictor": name, "accepted": float(accepted), **quality(said.score, said.prob, label)})
        for name, said in predictions.items()
    ]


def by_value(values: NDArray[np.generic]) -> Mapping[str | int, NDArray[np.bool_]]:
    """Value -> mask [N], by rising value."""
    return {value.item(): values == value for value in np.unique(values)}


def reliability_bins(prob: Tensor, accept_prob: Tensor, num_bins: int = NUM_BINS) -> list[dict[str, float]]:
    """Bins of equal mass, those that the expected calibration error sums over (modules/metrics.py), lowest first.

    prob, accept_prob [N]. Each: predicted and observed, means over the bin, and count, its tokens. Empty bins are left
    out.
    """
    order = prob.argsort(stable=True)
    bins = zip(
        prob.double()[order].tensor_split(num_bins), accept_prob.double()[order].tensor_split(num_bins), strict=True
    )
    return [
        {"predicted": float(predicted.mean()), "observed": float(observed.mean()), "count": len(predicted)}
        for predicted, observed in bins
        if len(predicted)
    ]


def reliability_rows(
    tokens: LabelledTokens, predictions: Mapping[str, Prediction], shown: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """One row for each of these predictors and bin; none of those that give no probability."""
    for name in shown:
        prob = predictions[name].prob
        if prob is not None:
            yield from (json_values({"predictor": name, **bin}) for bin in reliability_bins(prob, tokens.accept_prob))

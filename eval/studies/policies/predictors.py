"""Who predicts that a drafted token will be accepted, and what they say of the tokens of recorded rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.eval.replay.rollouts import ChainRollouts, Floats
from draftsmith.eval.replay.stop_rules import online_features
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.online_logistic import OnlineLogistic
from draftsmith.modules.acceptance.policies import ConfidenceName
from draftsmith.modules.decoding.confidence import log_odds_of
from draftsmith.modules.metrics import fit_platt

# The label of the head in rollouts.
HEAD = "head"
RAW, CORRECTED, CALIBRATED = "head, raw", "head, corrected", "head, calibrated"
Q, MAX_Q, ENTROPY = "q(y)", "max q", "entropy"
FITTED_Q, FITTED_ENTROPY, ONLINE = "q(y), fitted", "entropy, fitted", "online logistic"

WHAT = {
    RAW: "the head's output, as SpecDec++'s threshold reads it",
    CORRECTED: "log(w_rej/w_acc) added to its logit",
    CALIBRATED: "and the scale and shift that training fitted on held-out labels",
    Q: "the draft's probability of the token",
    MAX_Q: "the draft's probability of its best token",
    ENTROPY: "entropy of the draft's law, negated: a score without a probability",
    FITTED_Q: "logistic fit to logit q(y) on the fit prompts",
    FITTED_ENTROPY: "logistic fit to the entropy on the fit prompts",
    ONLINE: "logistic fit to logit max q, learned while decoding: no training",
}


@dataclass(frozen=True)
class Judged:
    """N drafted tokens with labels, in the order of rounds.

    accept_prob [N] in [0, 1]; depth [N], 1 for a round's first token; task [N]; log_q, log_max_q, entropy [N]; head
    [N]: raw logits; online [N]: the online fit's probabilities, each from what it had learned before that round.
    """

    accept_prob: Tensor
    depth: NDArray[np.int64]
    task: NDArray[np.str_]
    log_q: Tensor
    log_max_q: Tensor
    entropy: Tensor
    head: Tensor
    online: Tensor


@dataclass(frozen=True)
class Prediction:
    """score [N] ranks tokens, higher is likelier; prob [N] is a probability, where the predictor gives one."""

    score: Tensor
    prob: Tensor | None


def judge(rollouts: ChainRollouts) -> Judged:
    """The labelled tokens that a head has read, too: the last one before the drafter's context ends has not been."""
    mask = rollouts.judged() & ~np.isnan(rollouts.heads[HEAD])

    def flat(values: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[mask]))

    tasks = np.array([rollouts.answers[number].task for number in rollouts.answer], dtype=np.str_)
    depth = np.broadcast_to(np.arange(1, rollouts.depth + 1), mask.shape)
    return Judged(
        flat(rollouts.accept_prob),
        depth[mask],
        np.broadcast_to(tasks[:, None], mask.shape)[mask],
        flat(rollouts.log_q),
        flat(rollouts.log_max_q),
        flat(rollouts.entropy),
        flat(rollouts.heads[HEAD]),
        flat(online_probs(rollouts)),
    )


def online_probs(rollouts: ChainRollouts, confidence: ConfidenceName = "max_q", repeats: bool = False) -> Floats:
    """[S, K]: P(accepted) by the online fit on the log-odds of max q, or of q(y), and on repetitions of the text, as it
    goes through the answers one after the other.

    It learns from the rounds that decoding with drafts of K tokens would run, once they are verified, and says its
    opinion at every other position in passing.
    """
    model, features = OnlineLogistic(1 + repeats), online_features(rollouts, confidence, repeats)
    labelled = rollouts.judged()
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


def predictions(judged: Judged, fit: Judged, head: AcceptanceHead) -> dict[str, Prediction]:
    """Name -> what each predictor says of `judged`; logistic fits are made on `fit`."""
    raw = judged.head
    logits = {RAW: raw, CORRECTED: head.corrected(raw), CALIBRATED: head.calibrated(raw)}
    found = {name: Prediction(logit, torch.sigmoid(logit)) for name, logit in logits.items()}
    found[Q] = Prediction(judged.log_q, judged.log_q.exp())
    found[MAX_Q] = Prediction(judged.log_max_q, judged.log_max_q.exp())
    found[ENTROPY] = Prediction(-judged.entropy, None)
    features = {
        FITTED_Q: (log_odds_of(judged.log_q), log_odds_of(fit.log_q)),
        FITTED_ENTROPY: (-judged.entropy, -fit.entropy),
    }
    for name, (own, others) in features.items():
        scale, bias = fit_platt(others, fit.accept_prob)
        found[name] = Prediction(own, torch.sigmoid(scale * own + bias))
    found[ONLINE] = Prediction(judged.online, judged.online)
    return found


def part(prediction: Prediction, mask: NDArray[np.bool_]) -> Prediction:
    """Of the tokens [N] in the mask."""
    chosen = torch.from_numpy(mask)
    return Prediction(prediction.score[chosen], None if prediction.prob is None else prediction.prob[chosen])


def by_value(values: NDArray[np.generic]) -> Mapping[str | int, NDArray[np.bool_]]:
    """Value -> mask [N], by rising value."""
    return {value.item(): values == value for value in np.unique(values)}

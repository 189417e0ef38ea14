"""How good the probabilities are that stop policies go by, on drafted tokens down to the first rejected one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.eval.replay import replay
from draftsmith.eval.replay.rollouts import Floats
from draftsmith.eval.studies.policies.found import Scene
from draftsmith.eval.studies.policies.play import FITTED, ONLINE, RAW, fitted_probs
from draftsmith.eval.studies.policies.predictors import Prediction, online_probs

Q, MAX_Q, ENTROPY = "q(y)", "max q", "entropy"


@dataclass(frozen=True)
class Tokens:
    """N labelled tokens of one scene: labels [N] in [0, 1], depth [N] from 1, and what each predictor says of them."""

    label: Tensor
    depth: NDArray[np.int64]
    said: dict[str, Prediction]


def labelled_tokens(scene: Scene) -> Tokens:
    """Of the reported prompts; those that every head has read: the last one before a drafter's context ends is not."""
    rollouts = scene.test
    mask = rollouts.judged()
    for logits in rollouts.heads.values():
        mask = mask & ~np.isnan(logits)

    def of(values: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[mask]))

    log_q, log_max_q = of(rollouts.log_q), of(rollouts.log_max_q)
    said = {
        Q: Prediction(log_q, log_q.exp()),
        MAX_Q: Prediction(log_max_q, log_max_q.exp()),
        ENTROPY: Prediction(-of(rollouts.entropy), None),
    }
    probs = {FITTED: fitted_probs(rollouts, scene.dev)}
    probs |= {name: online_probs(rollouts, *how) for name, how in ONLINE.items()}
    for name, head in scene.heads.items():
        for suffix, calibrated in ((RAW, False), ("", True)):
            probs[name + suffix] = replay.head_probs(rollouts.heads[name], head, calibrated)
    for name, values in probs.items():
        said[name] = Prediction(of(values), of(values))
    depth = np.broadcast_to(np.arange(1, rollouts.depth + 1), mask.shape)
    return Tokens(of(rollouts.accept_prob), depth[mask], said)

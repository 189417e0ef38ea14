"""Hand-made rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftsmith.benchmarks.papers.rollouts import ChainRollouts, TargetAnswer

ROOM = 50


def hand_rollouts(agreed: Sequence[Sequence[bool]], depth: int, seed: int = 0, head: str = "head") -> ChainRollouts:
    """Greedy rollouts of a drafter that agrees with token t of answer a where agreed[a][t], whatever round it is; its
    confidences and the head's logits are random, those of a place in the text the same in every round."""
    rng = np.random.default_rng(seed)
    answers, columns = [], {name: [] for name in ("answer", "start", "num_accepted", "prob", "log_q", "logit")}
    for number, own in enumerate(agreed):
        length = len(own)
        task = "even" if number % 2 == 0 else "odd"
        answers.append(TargetAnswer(f"row-{number}", task, 5, list(range(length)), True, ROOM))
        log_q, logits = np.log(rng.uniform(0.05, 0.99, length + depth)), rng.normal(size=length + depth)
        for start in range(1, length):
            left = list(own[start:])[:depth]
            accepted = left.index(False) if False in left else len(left)
            verified = min(accepted + 1, len(left))
            prob = np.full(depth, np.nan)
            prob[:verified] = left[:verified]
            columns["answer"].append(number)
            columns["start"].append(start)
            columns["num_accepted"].append(accepted)
            columns["prob"].append(prob)
            columns["log_q"].append(log_q[start : start + depth])
            columns["logit"].append(logits[start : start + depth])
    found = {name: np.array(values) for name, values in columns.items()}
    shape = found["prob"].shape
    return ChainRollouts(
        answers=answers,
        answer=found["answer"],
        start=found["start"],
        token=np.zeros(shape, np.int64),
        num_accepted=found["num_accepted"],
        log_q=found["log_q"],
        log_max_q=found["log_q"],
        entropy=-found["log_q"],
        accept_prob=found["prob"],
        heads={head: found["logit"]},
        past_end=np.zeros(len(found["start"]), np.int64),
        repeat=np.zeros(shape),
    )

"""Seconds of forwards on this machine: a target's calls by the rows they read, and a drafter's steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftsmith.eval.cost.clock import Clock, Stopwatch, medians
from draftsmith.eval.replay.coupling import ReadAnswer
from draftsmith.eval.replay.record import Recording, walk
from draftsmith.modules.decoding.protocols import Drafter, DraftTree
from draftsmith.modules.sampling import Source
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CHILDREN = 4  # of every node of the trees whose cost is taken
STEPS = 6  # a draft's steps are the difference between one of so many and one of a single step
PROPOSALS = 24  # that are timed of a drafter on a prompt, of each length
CURVE_REPEATS = 15


@dataclass(frozen=True)
class DraftCost:
    """Seconds of a drafter. prefill: reading the prompt. first: the draft's first step (tree: level), which reads what
    was emitted. step: every further one."""

    prefill: float
    first: float
    step: float


def straight(curve: Mapping[int, float], rows: int) -> float:
    """A straight line between the measured numbers of rows; beyond them the last one goes on, and never down: noise may
    have timed more rows as faster. A single number holds for all."""
    x, y = list(curve), list(curve.values())
    if len(x) > 1 and rows > x[-1]:
        return y[-1] + (rows - x[-1]) * max(0.0, y[-1] - y[-2]) / (x[-1] - x[-2])
    return float(np.interp(rows, x, y))


@torch.inference_mode()
def target_curves(
    target: CausalLM,
    ids: Sequence[int],
    context: int,
    clock: Clock,
    rows_read: Sequence[int] = ROWS,
    repeats: int = CURVE_REPEATS,
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of one target call by rows, as chains and as trees, all logits included; of a short context the rows that
    it has positions for, behind half of it at least.

    ids: a prompt and its answer. context: of these tokens to keep, where there is room for so many.
    """
    limit = target.info.max_position
    kept = max(1, min(context, len(ids), limit - min(max(rows_read), limit // 2)))
    session = target.session(1, kept + max(rows_read) + 1)
    session.extend([ids[:kept]])

    def call(rows: int, tree: bool) -> None:
        fed = [ids[i % len(ids)] for i in range(rows)]
        session.extend([fed], [tree_parents(rows)] if tree else None, num_logits=rows)
        session.keep([kept])

    def levels(rows: int, tree: bool) -> int:
        return num_levels(tree_parents(rows)) if tree else rows

    kinds = [(rows, tree) for rows in rows_read for tree in (False, True) if levels(rows, tree) <= limit - kept]
    calls = {f"{rows} {tree}": lambda rows=rows, tree=tree: call(rows, tree) for rows, tree in kinds}
    taken = medians(calls, repeats, clock)
    chains, trees = ({rows: taken[f"{rows} {tree}"] for rows, tree in kinds if tree == kind} for kind in (False, True))
    return chains, trees


def tree_parents(rows: int) -> list[int]:
    """Parents in the trees whose cost is taken, the root first."""
    return [-1, *(i // CHILDREN for i in range(rows - 1))]


def num_levels(parents: Sequence[int]) -> int:
    """Positions that a tree takes, the root's among them."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 + (levels[parent] if parent >= 0 else 0))
    return max(levels)


class ProbedDrafter:
    """A drafter whose proposals are of one step and of STEPS in turn, fewer where a context ends, and timed; all else
    is the drafter's own.

    prefill: seconds of each answer's first proposal. seconds: of the others, by the forwards that they took.
    """

    def __init__(self, drafter: Drafter, clock: Clock):
        self._drafter, self._watch, self._number = drafter, Stopwatch(clock), 0
        self.prefill: list[float] = []
        self.seconds: dict[int, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def start(self, *answers: Any) -> None:
        self._number = 0
        self._drafter.start(*answers)

    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        counts = [min(STEPS if self._number % 2 else 1, limit) for limit in limits]
        trees = self._watch.timed(self._drafter.propose)(counts, params, sources)
        taken, calls = self._watch.take(), trees[0].draft_calls
        if trees[0].tokens and calls:
            (self.seconds.setdefault(calls, []) if self._number else self.prefill).append(taken)
        self._number += 1
        return trees


def draft_cost(
    drafter: Drafter, prompts: Sequence[Sequence[int]], answers: Sequence[ReadAnswer], how: Recording, clock: Clock
) -> DraftCost:
    """The cost of draft steps, from proposals along the answers. The first one reads the prompt as well. Where a
    context leaves no room for a second step, one is taken to cost what the first does; where it leaves none for drafts,
    they cost nothing."""
    probed: Any = ProbedDrafter(drafter, clock)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        for _ in walk(probed, answer, prompt, how, STEPS, number):
            pass
    if not probed.seconds:
        return DraftCost(statistics.median(probed.prefill) if probed.prefill else 0.0, 0.0, 0.0)
    few, many = min(probed.seconds), max(probed.seconds)
    first, last = (statistics.median(probed.seconds[count]) for count in (few, many))
    step = max(last - first, 0.0) / (many - few) if many > few else first / few
    return DraftCost(max(statistics.median(probed.prefill) - first, 0.0), max(first - (few - 1) * step, 0.0), step)

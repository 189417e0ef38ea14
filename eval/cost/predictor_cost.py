"""What judging a drafted token takes, of the draft step that a judge may save."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from draftsmith.eval.bench.measure import EngineRunner
from draftsmith.eval.cost.synthetic import random_eagle_head
from draftsmith.eval.decoder_cost import Row
from draftsmith.eval.pairs import GREEDY, SAMPLING, Pair
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, Feature, HeadJudge
from draftsmith.modules.acceptance.policies import Judge, JudgedStop, OnlineJudge, ThresholdRule
from draftsmith.modules.decoding.protocols import DraftTree, DraftView
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.drafters.eagle.drafting import EagleDrafter
from draftsmith.modules.types import SamplingParams

DRAFTED = 8  # tokens of every round, whatever the judge says
# As `train acceptance` makes heads of labels of rounds; what a head says costs the same, trained or not.
FEATURES: tuple[Feature, ...] = ("log_q", "logit_max_q", "entropy", "depth", "repeat")
NARROWER = 4


def random_head(hidden_size: int, **settings: Any) -> AcceptanceHead:
    return AcceptanceHead(AcceptanceHeadConfig(hidden_size, **settings)).requires_grad_(False)


def judges(pair: Pair, repeats: int) -> Iterator[Row]:
    """Of a draft model's tokens and of an EAGLE head's: heads of both kinds, and no head at all."""
    target, draft = pair.packed
    eagle = random_eagle_head(target)

    def by_draft(stop: JudgedStop) -> Any:
        return DraftModelDrafter(draft, [stop], pair.capacity)

    def by_eagle(stop: JudgedStop) -> Any:
        return EagleDrafter(eagle, target, [stop], pair.capacity)

    for name, make, reader in (("draft model", by_draft, draft), ("EAGLE head", by_eagle, target)):
        size = reader.info.hidden_size
        published = random_head(size)
        early = random_head(size, num_blocks=1, state="before", features=FEATURES, width=size // NARROWER)
        every: dict[str, Callable[[], Judge]] = {
            "a head of labels of rounds": partial(HeadJudge, early, reader.embed),
            "the published head, D=3": partial(HeadJudge, published),
            "online": OnlineJudge,
        }
        for who, judge in every.items():
            for mode, params in (("T=0", GREEDY), ("T=1", SAMPLING)):
                found = [share_of_a_step(pair, make, judge(), params) for _ in range(max(repeats, 3))]
                share, seconds = (statistics.median(column) for column in zip(*found, strict=True))
                aim = "<= 3" if who.startswith("a head of") else ""
                yield Row(f"judging by {who}, of a step of the {name}, {mode}", pair.name, 100 * share, "%", aim)
                yield Row("the same, a token", pair.name, 1e6 * seconds, "us")


@torch.inference_mode()
def share_of_a_step(
    pair: Pair, make: Callable[[JudgedStop], Any], judge: Judge, params: SamplingParams
) -> tuple[float, float]:
    """(judging one token by drafting one, seconds of the first), in one answer, interleaved as they are in use: a judge
    that is asked over and over finds everything at hand, and takes a fraction of this. Medians of the wall's seconds:
    the CPU time's clock is a system call, which disturbs what is as short as this."""
    drafter = make(JudgedStop(judge, ThresholdRule(1.0), DRAFTED, DRAFTED))
    runner = EngineRunner(pair.packed[0], drafter, params, ())
    runner(pair.prompts[0], DRAFTED, 0)  # uncounted: what is made once
    asked: list[float] = []
    drafted: list[float] = []  # each proposal's seconds by its tokens, without what was asked
    ask, propose = judge.prob, drafter.propose

    def timed_ask(view: DraftView) -> float:
        started = time.perf_counter()
        found = ask(view)
        asked.append(time.perf_counter() - started)
        return found

    def timed_propose(*args: Any) -> list[DraftTree]:
        before, started = len(asked), time.perf_counter()
        (tree,) = propose(*args)
        drafted.append((time.perf_counter() - started - sum(asked[before:])) / max(len(tree.tokens), 1))
        return [tree]

    vars(judge)["prob"], vars(drafter)["propose"] = timed_ask, timed_propose
    runner(pair.prompts[0], pair.new_tokens, 0)
    each = statistics.median(asked)
    return each / statistics.median(drafted[1:]), each  # the first one reads the prompt

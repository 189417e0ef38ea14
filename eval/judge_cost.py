"""What judging a drafted token takes, of the draft step that a judge may save."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from draftsmith.eval.clocks import Forwards
from draftsmith.eval.decoder_cost import Row
from draftsmith.eval.measure import EngineRunner
from draftsmith.eval.pairs import GREEDY, SAMPLING, Pair
from draftsmith.eval.synthetic import random_eagle_head
from draftsmith.modules.decoding.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.decoding.policies import Judge, JudgedStop, OnlineJudge, ThresholdRule
from draftsmith.modules.heads.acceptance import AcceptanceHead, AcceptanceHeadConfig, HeadJudge
from draftsmith.modules.heads.eagle import EagleDrafter
from draftsmith.modules.types import SamplingParams

DRAFTED = 8  # tokens of every round, whatever the judge says
# As `train acceptance` makes heads for chains; what they say costs the same, trained or not.
FEATURES = ("log_q", "logit_max_q", "entropy", "repeat")


def random_head(hidden_size: int, **settings: Any) -> AcceptanceHead:
    return AcceptanceHead(AcceptanceHeadConfig(hidden_size, **settings)).requires_grad_(False)


def judges(pair: Pair, repeats: int) -> Iterator[Row]:
    """Of a draft model's tokens and of an EAGLE head's: a head before the token, the published one, no head at all."""
    target, draft = pair.packed
    eagle = random_eagle_head(target)

    def by_draft(stop: JudgedStop) -> Any:
        return DraftModelDrafter(draft, stop, pair.capacity)

    def by_eagle(stop: JudgedStop) -> Any:
        return EagleDrafter(eagle, target, stop, pair.capacity)

    for name, make, reader in (("draft model", by_draft, draft), ("EAGLE head", by_eagle, target)):
        size = reader.info.hidden_size
        early = random_head(size, num_blocks=1, state="before", features=FEATURES)
        every: dict[str, Callable[[], Judge]] = {
            "a head that judges before the next step": lambda early=early, reader=reader: HeadJudge(early, reader.embed),
            "the published head, D=3": lambda size=size: HeadJudge(random_head(size)),
            "online": OnlineJudge,
        }
        for who, judge in every.items():
            for mode, params in (("T=0", GREEDY), ("T=1", SAMPLING)):
                found = [share_of_a_step(pair, make, judge(), params) for _ in range(max(repeats, 3))]
                share, seconds = (statistics.median(column) for column in zip(*found, strict=True))
                aim = "<= 3" if who.startswith("a head") else ""
                yield Row(f"judging by {who}, of a {name}'s step, {mode}", pair.name, 100 * share, "%", aim)
                yield Row("the same, a token", pair.name, 1e6 * seconds, "us")


@torch.inference_mode()
def share_of_a_step(
    pair: Pair, make: Callable[[JudgedStop], Any], judge: Judge, params: SamplingParams
) -> tuple[float, float]:
    """(judging one token by drafting one, seconds of the first), in one answer, interleaved as they are in use."""
    stop = JudgedStop(judge, ThresholdRule(1.0), DRAFTED, DRAFTED)
    drafter = make(stop)
    runner = EngineRunner(pair.packed[0], drafter, params, ())
    runner(pair.prompts[0], DRAFTED, 0)  # uncounted: what is made once
    drafting, judging = Forwards(pair.clock), Forwards(pair.clock)
    asked = 0
    ask = judge.prob

    def counted(view: Any) -> float:
        nonlocal asked
        asked += 1
        return ask(view)

    vars(judge)["prob"] = counted
    with drafting.watch((drafter, "propose")), judging.watch((judge, "prob")):
        steps = runner(pair.prompts[0], pair.new_tokens, 0).trace.steps
    drafted = sum(step.num_drafted for step in steps)
    each = judging.seconds / asked
    return each / ((drafting.seconds - judging.seconds) / drafted), each

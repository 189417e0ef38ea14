"""What predicting a drafted token's acceptance takes, of the draft step that a predictor may save."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.benchmarks.decoder_cost import Number
from draftsmith.benchmarks.pairs import GREEDY, SAMPLING, Pair
from draftsmith.benchmarks.synthetic import random_eagle_head
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, Feature
from draftsmith.modules.acceptance.policies import OnlinePredictor, Predictor, PredictorStop, ThresholdRule
from draftsmith.modules.acceptance.predictor import HeadPredictor
from draftsmith.modules.decoding.protocols import Drafter, DraftTree, DraftView
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.drafters.feature_heads import FeatureDrafter
from draftsmith.modules.sampling import Source
from draftsmith.modules.types import SamplingParams

DRAFTED = 8  # tokens of every round, whatever the predictor says
# As `train acceptance` makes heads of labels of rounds; what a head says costs the same, trained or not.
FEATURES: tuple[Feature, ...] = ("log_q", "logit_max_q", "entropy", "depth", "repeat")
FEWER: tuple[Feature, ...] = ("log_q", "logit_q", "depth", "repeat")
NARROWER, WIDTH = 4, 128


def random_head(hidden_size: int, **settings: Any) -> AcceptanceHead:
    return AcceptanceHead(AcceptanceHeadConfig(hidden_size, **settings)).requires_grad_(False)


def predictors(pair: Pair, repeats: int) -> Iterator[Number]:
    """Predictors of a draft model's tokens and of an EAGLE head's: heads of both kinds, and no head at all."""
    target, draft = pair.packed
    eagle = random_eagle_head(target)

    def by_draft(stop: PredictorStop) -> Drafter:
        return DraftModelDrafter(draft, [stop], pair.capacity)

    def by_eagle(stop: PredictorStop) -> Drafter:
        return FeatureDrafter(eagle, target, [stop], pair.capacity)

    for name, make, reader in (("draft model", by_draft, draft), ("EAGLE head", by_eagle, target)):
        size = reader.info.hidden_size
        published = random_head(size)
        early = random_head(size, num_blocks=1, state="before", features=FEATURES, width=size // NARROWER)
        rectified = dict(num_blocks=0, state="before", width=WIDTH, activation="relu", standardize=True)
        wide, lean = (random_head(size, features=features, **rectified) for features in (FEATURES, FEWER))

        def on_top(head: AcceptanceHead, embed: Callable[[Tensor], Tensor]) -> OnlinePredictor:
            return OnlinePredictor(head=HeadPredictor(head, embed))

        every: dict[str, Callable[[], Predictor]] = {
            "a head with a block, a quarter as wide": partial(HeadPredictor, early, reader.embed),
            f"a rectified head of width {WIDTH}": partial(HeadPredictor, wide, reader.embed),
            "the same without max q and entropy": partial(HeadPredictor, lean, reader.embed),
            "that one and online on top": partial(on_top, lean, reader.embed),
            "the published head, D=3": partial(HeadPredictor, published),
            "online": OnlinePredictor,
            "a constant": Constant,
        }
        for who, predictor in every.items():
            for mode, params in (("T=0", GREEDY), ("T=1", SAMPLING)):
                found = [share_of_a_step(pair, make, predictor(), params) for _ in range(max(repeats, 3))]
                share, seconds = (statistics.median(column) for column in zip(*found, strict=True))
                aim = ("<= 1" if pair.weight_bytes else "<= 5") if "head of" in who or "the same" in who else ""
                yield Number(f"predicting by {who}, of a step of the {name}, {mode}", pair.name, 100 * share, "%", aim)
                yield Number("the same, a token", pair.name, 1e6 * seconds, "us")


class Constant(Predictor):
    """What being asked takes, and nothing else."""

    late = learns = False

    def prob(self, view: DraftView) -> float:
        return 1.0


class TimedPredictor:
    """A predictor whose questions are timed, one by one."""

    def __init__(self, predictor: Predictor):
        self._predictor, self.seconds = predictor, list[float]()
        self.learns, self.late = predictor.learns, predictor.late
        self.reset, self.start_round, self.observe = predictor.reset, predictor.start_round, predictor.observe

    def prob(self, view: DraftView) -> float:
        started = time.perf_counter()
        found = self._predictor.prob(view)
        self.seconds.append(time.perf_counter() - started)
        return found


class TimedWithoutPredictor:
    """A drafter whose proposals are timed by their tokens, in CPU time, without what was asked of the predictor, whose
    questions count as their median: of one that was interrupted the wall's clock says nothing."""

    def __init__(self, drafter: Drafter, asked: TimedPredictor):
        self._drafter, self._asked, self.seconds_a_token = drafter, asked, list[float]()
        self.begin, self.advance, self.select = drafter.begin, drafter.advance, drafter.select
        self.capture = drafter.capture

    def propose(self, limits: Sequence[int], params: SamplingParams, sources: Sequence[Source]) -> list[DraftTree]:
        asked, started = self._asked.seconds, time.process_time()
        before = len(asked)
        (tree,) = self._drafter.propose(limits, params, sources)
        taken = time.process_time() - started
        if len(asked) > before:
            taken -= (len(asked) - before) * statistics.median(asked[before:])
        self.seconds_a_token.append(taken / max(len(tree.tokens), 1))
        return [tree]


@torch.inference_mode()
def share_of_a_step(
    pair: Pair, make: Callable[[PredictorStop], Drafter], predictor: Predictor, params: SamplingParams
) -> tuple[float, float]:
    """(predicting for one token by drafting one, seconds of the first), in one answer, interleaved as they are in use:
    a predictor that is asked over and over finds everything at hand, and takes a fraction of this. Medians; of the
    predictor of the wall's seconds: the CPU time's clock is a system call, which disturbs what is as short as this."""
    asked = TimedPredictor(predictor)
    drafter = TimedWithoutPredictor(make(PredictorStop(asked, ThresholdRule(1.0), DRAFTED, DRAFTED)), asked)
    runner = EngineRunner(pair.packed[0], drafter, params, ())
    runner([pair.prompts[0]], DRAFTED, [0])  # uncounted: what is made once
    asked.seconds.clear()
    drafter.seconds_a_token.clear()
    runner([pair.prompts[0]], pair.new_tokens, [0])
    each = statistics.median(asked.seconds)
    return each / statistics.median(drafter.seconds_a_token[1:]), each  # the first one reads the prompt

"""What a round of draft trees whose size is `auto` takes on this machine, measured once a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict
from typing import Any

import torch

from draftsmith.eval.bench.measure import BenchPrompt
from draftsmith.eval.cost.clocks import clock_of, synchronised
from draftsmith.eval.cost.costs import PROPOSALS, STEPS, DraftCost, draft_cost, straight, target_curves
from draftsmith.eval.replay.record import Answers, Recording
from draftsmith.modules.acceptance.tree_rule import TreeTimes
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.drafters.methods import MAX_NODES, Models
from draftsmith.modules.types import SamplingParams

ROWS, REPEATS = (1, 2, 4, 8, 16, 32, 64), 5
PROMPT_TOKENS, SEED = 128, 0
CURVE = "target, by rows"  # of `measured`


def tree_times(
    models: Models, trees: str, probe: Callable[[int], Drafter], measured: MutableMapping[str, Any]
) -> TreeTimes:
    """Seconds of trees, on a prompt of random tokens: what they are changes no forward's time.

    trees, probe: as of `MachineTimes.tree_times`. measured: what is known, to which is added what was not.
    """
    target = models.target
    if CURVE not in measured or trees not in measured:
        clock = clock_of("cpu") if target.device.type == "cpu" and torch.get_num_threads() == 1 else synchronised
        how = Recording(SamplingParams(), STEPS, 2 * PROPOSALS, SEED, ())
        prompt = random_prompt(models, how.max_new_tokens + MAX_NODES)
        with torch.inference_mode():
            reading = Answers(target, how).read(prompt, 0, 0)
            if CURVE not in measured:
                context = len(prompt.prompt_ids)
                _, measured[CURVE] = target_curves(models, prompt, reading, context, clock, ROWS, REPEATS)
            measured[trees] = asdict(draft_cost(probe(STEPS), [prompt], [reading], how, clock))
    curve = {int(rows): seconds for rows, seconds in measured[CURVE].items()}  # JSON's keys are text
    return times_of(curve, DraftCost(**measured[trees]), MAX_NODES)


def random_prompt(models: Models, room: int) -> BenchPrompt:
    """room: for so many tokens after it."""
    info = models.target.info
    length = max(2, min(PROMPT_TOKENS, min(models.capacity, info.max_position) - room))
    draws = torch.Generator().manual_seed(SEED)
    return BenchPrompt("probe", torch.randint(info.vocab_size, (length,), generator=draws).tolist())


def times_of(curve: Mapping[int, float], draft: DraftCost, most_nodes: int) -> TreeTimes:
    """Of trees of up to so many nodes. curve: seconds of the target's calls by rows."""
    calls = (straight(curve, nodes + 1) for nodes in range(most_nodes + 1))
    # A target reads more rows in no less time: where the clock says so, it errs.
    return TreeTimes(draft.first, draft.step, tuple(itertools.accumulate(calls, max)))

"""Rollouts of prompt lookup: what it would draft everywhere in the target's answers. No model is asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftsmith.eval.bench.measure import BenchPrompt
from draftsmith.eval.replay.coupling import num_equal
from draftsmith.eval.replay.record import Answers, Recording, walk
from draftsmith.eval.replay.rollouts import ChainRollouts, joined
from draftsmith.modules.decoding.protocols import EachRow
from draftsmith.modules.drafters.prompt_lookup import PromptLookupDrafter


def record_lookup(answers: Answers, prompts: Sequence[BenchPrompt], how: Recording, ngram: int) -> ChainRollouts:
    """Drafts of `how.depth` tokens or fewer. A lookup has no law: what is known of laws is NaN, accepted or not is not,
    since its tokens are kept where they are the text's, greedy and sampling alike."""
    return joined([_of_prompt(answers, prompt, number, how, ngram) for number, prompt in enumerate(prompts)])


def _of_prompt(answers: Answers, prompt: BenchPrompt, number: int, how: Recording, ngram: int) -> ChainRollouts:
    reading = answers.read(prompt, number, how.depth)
    length = len(reading.answer.tokens)
    shape = (length - 1, how.depth)
    token, accept = np.full(shape, -1, np.int64), np.full(shape, np.nan)
    accepted, past_end = np.zeros(length - 1, np.int64), np.zeros(length - 1, np.int64)
    drafter = EachRow([PromptLookupDrafter(how.depth, ngram)])
    for start, tree in walk(drafter, reading, prompt.prompt_ids, how, how.depth, number):
        row, drafted = start - 1, tree.tokens
        token[row, : len(drafted)] = drafted
        equal = num_equal(drafted, reading.text.tokens[start:])
        accepted[row] = min(equal, length - start)
        past_end[row] = equal - accepted[row]
        judged = min(equal + 1, len(drafted), length - start)
        accept[row, :judged] = np.arange(judged) < equal
    unknown = np.full(shape, np.nan)
    return ChainRollouts(
        answers=[reading.answer],
        answer=np.zeros(length - 1, np.int64),
        start=np.arange(1, length),
        token=token,
        num_accepted=accepted,
        log_q=unknown,
        log_max_q=unknown,
        entropy=unknown,
        accept_prob=accept,
        overlap=accept,
        past_end=past_end,
    )

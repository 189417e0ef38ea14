"""Rollouts of prompt lookup: what it would draft everywhere in the target's answers. No model is asked."""

from __future__ import annotations

import numpy as np

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.coupling import verdict_of
from draftsmith.eval.replay.record import Recording, TargetAnswers, walk
from draftsmith.eval.replay.rollouts import ChainRollouts
from draftsmith.modules.decoding.protocols import EachRow
from draftsmith.modules.drafters.prompt_lookup import PromptLookupDrafter


class LookupRecorder:
    """Records one answer after another. A lookup has no distribution: what is known of one is NaN, accepted or not is
    not, since its tokens are kept where they are the text's, greedy and sampling alike."""

    def __init__(self, answers: TargetAnswers, how: Recording, ngram: int):
        """how: of drafts of `depth` tokens or fewer."""
        self._answers, self._how, self._ngram = answers, how, ngram

    def __call__(self, prompt: BenchPrompt, number: int) -> ChainRollouts:
        """number: of the answer, which seeds it."""
        how = self._how
        reading = self._answers.read(prompt, number, how.depth)
        length = len(reading.answer.tokens)
        shape = (length - 1, how.depth)
        token, accept = np.full(shape, -1, np.int64), np.full(shape, np.nan)
        accepted, past_end = np.zeros(length - 1, np.int64), np.zeros(length - 1, np.int64)
        drafter = EachRow([PromptLookupDrafter(how.depth, self._ngram)])
        for start, tree in walk(drafter, reading, prompt.prompt_ids, how, how.depth, number):
            row, drafted = start - 1, tree.tokens
            token[row, : len(drafted)] = drafted
            verdict = verdict_of(drafted, reading, start)
            accepted[row], past_end[row] = verdict.accepted, verdict.past_end
            accept[row, : verdict.labelled] = np.arange(verdict.labelled) < verdict.accepted + verdict.past_end
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

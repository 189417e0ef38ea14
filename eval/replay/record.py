"""Recording rollouts: the target answers once; then the production drafter drafts at every position of the answer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.coupling import CoupledSource, ReadAnswer, TargetText
from draftsmith.eval.replay.rollouts import Rollouts, TargetAnswer, joined
from draftsmith.modules.decoding.loop import Generation, generate_one, room_for
from draftsmith.modules.decoding.protocols import Drafter, DraftTree, Outcome
from draftsmith.modules.sampling import TorchSource, best_token, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class Recording:
    """How answers are made. depth: drafted tokens that are kept of every round, or times that a tree is expanded.
    Answer number i is seeded with `seed` + i, as the bench does."""

    params: SamplingParams
    depth: int
    max_new_tokens: int
    seed: int
    eos_ids: tuple[int, ...]


def record_all(recorder: Callable[[BenchPrompt, int], Rollouts], prompts: Sequence[BenchPrompt]) -> Rollouts:
    """Rollouts everywhere in the target's answers to all prompts. recorder: gives those of a prompt and its number."""
    return joined([recorder(prompt, number) for number, prompt in enumerate(prompts)])


class TargetAnswers:
    """The target's own answers, as decoding without a drafter gives them; each is made once, whoever asks for it."""

    def __init__(self, target: CausalLM, how: Recording):
        self._target, self._how = target, how
        self._made: dict[int, Generation] = {}

    def read(self, prompt: BenchPrompt, number: int, further: int, capture: tuple[int, ...] = ()) -> ReadAnswer:
        """number: of the answer, which seeds it. further: tokens after an end token that a round may still draft;
        whether the target would have gone on with them is counted there. capture: what its drafter reads."""
        target, how, ids = self._target, self._how, prompt.prompt_ids
        if number not in self._made:
            source = TorchSource(how.seed + number)
            self._made[number] = generate_one(target, None, ids, how.params, how.max_new_tokens, source, how.eos_ids)
        made = self._made[number]
        room = room_for(ids, how.max_new_tokens, target.info)
        answer = TargetAnswer(prompt.id, prompt.task, len(ids), made.tokens, made.ended, room)
        count = min(further, room - len(made.tokens)) if made.ended else 0
        session = target.session(1, len(ids) + len(made.tokens) + count, capture, static=False)
        read = session.extend([[*ids, *made.tokens]], num_logits=len(made.tokens) + 1)
        tokens, rows = list(made.tokens), [read.logits[0]]
        source = TorchSource(seed_of(how.seed, number))
        for _ in range(count):
            last = rows[-1][-1]
            tokens.append(best_token(last) if how.params.greedy else source.draw(probabilities(last, how.params)))
            rows.append(session.extend([tokens[-1:]]).logits[0])
        logits = torch.cat(rows)[: len(tokens)]
        distributions = None if how.params.greedy else probabilities(logits, how.params)
        uniforms = [source.uniform() for _ in tokens]
        return ReadAnswer(answer, TargetText(tokens, distributions, uniforms), read.features[0], logits)


def seed_of(*numbers: int) -> int:
    """One seed from several numbers."""
    return zlib.crc32(repr(numbers).encode())


def walk(
    drafter: Drafter, reading: ReadAnswer, prompt: Sequence[int], how: Recording, count: int, number: int
) -> Iterator[DraftTree]:
    """The draft of every round that begins before token 1, 2, ... of the answer, at most `count` tokens deep."""
    tokens, read = reading.answer.tokens, len(prompt)
    drafter.begin(0, prompt, reading.features[:read], tokens[0])
    for start in range(1, len(tokens)):
        free = TorchSource(seed_of(how.seed, number, start))
        (tree,) = drafter.propose([count], how.params, [CoupledSource(reading.text, start, free)])
        yield tree
        # The feature that predicts token t is that of the token before it.
        row = slice(read + start - 1, read + start)
        drafter.advance([Outcome((tokens[start],), 0, reading.features[row], reading.logits[start : start + 1])])

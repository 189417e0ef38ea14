"""Recording rollouts: the target answers once; then the production drafter drafts at every position of the answer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from draftsmith.eval.measure import BenchPrompt
from draftsmith.eval.methods.base import Models
from draftsmith.eval.methods.chains import build_chain
from draftsmith.eval.rollouts.coupling import CoupledSource, Text
from draftsmith.eval.rollouts.rollouts import Answer, ChainRollouts, Floats, joined
from draftsmith.modules.decoding.confidence import draft_law
from draftsmith.modules.decoding.loop import Generation, generate, room_for
from draftsmith.modules.decoding.protocols import Drafter, DraftTree, DraftView, Outcome
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.heads.acceptance import AcceptanceHead
from draftsmith.modules.sampling import TorchSource, best_token, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

DrafterName = Literal["draft", "eagle"]


@dataclass(frozen=True)
class Recording:
    """How answers are made. depth: drafted tokens that are kept of every round, or times that a tree is expanded.
    Answer number i is seeded with `seed` + i, as the bench does."""

    params: SamplingParams
    depth: int
    max_new_tokens: int
    seed: int
    eos_ids: tuple[int, ...]


def record_chains(
    models: Models,
    drafter: DrafterName,
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    depth: int,
    max_new_tokens: int,
    seed: int,
    eos_ids: Sequence[int],
    heads: Mapping[str, AcceptanceHead] | None = None,
) -> ChainRollouts:
    """Chains of `depth` tokens by the draft model or the EAGLE head, everywhere in the target's answers.

    heads: label -> acceptance head of that drafter, whose logits are recorded.
    """
    how = Recording(params, depth, max_new_tokens, seed, tuple(eos_ids))
    recorder = ChainRecorder(models, drafter, how, heads or {})
    return joined([recorder(prompt, number) for number, prompt in enumerate(prompts)])


@dataclass(frozen=True)
class Reading:
    """An answer of n tokens as the target read it.

    text: the answer, and what the target would have gone on with after its end token.
    features [P + n, H]: of the prompt's P tokens and of the answer's, after the final norm. logits [n, V]: row i
    predicts answer token i.
    """

    answer: Answer
    text: Text
    features: Tensor
    logits: Tensor


class Answers:
    """The target's own answers, as decoding without a drafter gives them; each is made once, whoever asks for it."""

    def __init__(self, target: CausalLM, how: Recording):
        self._target, self._how = target, how
        self._made: dict[int, Generation] = {}

    def _generation(self, prompt: BenchPrompt, number: int) -> Generation:
        if number not in self._made:
            how, source = self._how, TorchSource(self._how.seed + number)
            self._made[number] = generate(
                self._target, None, prompt.prompt_ids, how.params, how.max_new_tokens, source, how.eos_ids
            )
        return self._made[number]

    def read(self, prompt: BenchPrompt, number: int, further: int) -> Reading:
        """number: of the answer, which seeds it. further: tokens after an end token that a round may still draft;
        whether the target would have gone on with them is counted there."""
        target, how, ids = self._target, self._how, prompt.prompt_ids
        made = self._generation(prompt, number)
        room = room_for(ids, how.max_new_tokens, target.info.max_position)
        answer = Answer(prompt.id, prompt.task, len(ids), made.tokens, made.ended, room)
        count = min(further, room - len(made.tokens)) if made.ended else 0
        session = target.session(len(ids) + len(made.tokens) + count)
        read = session.extend([*ids, *made.tokens], num_logits=len(made.tokens) + 1)
        tokens, rows = list(made.tokens), [read.logits]
        source = TorchSource(seed_of(how.seed, number))
        for _ in range(count):
            last = rows[-1][-1]
            tokens.append(best_token(last) if how.params.greedy else source.draw(probabilities(last, how.params)))
            rows.append(session.extend([tokens[-1]]).logits)
        logits = torch.cat(rows)[: len(tokens)]
        laws = None if how.params.greedy else probabilities(logits, how.params)
        uniforms = [source.uniform() for _ in tokens]
        return Reading(answer, Text(tokens, laws, uniforms), read.features, logits)


def seed_of(*numbers: int) -> int:
    """One seed from several numbers."""
    return zlib.crc32(repr(numbers).encode())


def walk(
    drafter: Drafter, reading: Reading, prompt: Sequence[int], how: Recording, count: int, number: int
) -> Iterator[tuple[int, DraftTree]]:
    """(t, draft) of every round that begins before token t = 1, 2, ... of the answer, at most `count` tokens deep."""
    tokens, read = reading.answer.tokens, len(prompt)
    drafter.start(prompt, reading.features[:read], tokens[0])
    for start in range(1, len(tokens)):
        free = TorchSource(seed_of(how.seed, number, start))
        yield start, drafter.propose(count, how.params, CoupledSource(reading.text, start, free))
        # The feature that predicts token t is that of the token before it.
        row = slice(read + start - 1, read + start)
        drafter.advance(Outcome((tokens[start],), 0, reading.features[row], reading.logits[start : start + 1]))


class _Keep(FixedLength):
    """Drafts a fixed number of tokens, and keeps what a stop policy is shown of each until it is taken."""

    def __init__(self, k: int):
        super().__init__(k)
        self._views: list[DraftView] = []

    def should_stop(self, view: DraftView) -> bool:
        self._views.append(view)
        return super().should_stop(view)

    def take(self) -> list[DraftView]:
        views, self._views = self._views, []
        return views


class ChainRecorder:
    """Records one answer after another, with one drafter."""

    def __init__(
        self,
        models: Models,
        drafter: DrafterName,
        how: Recording,
        heads: Mapping[str, AcceptanceHead],
        answers: Answers | None = None,
    ):
        """answers: those of other recordings of the same prompts, if there are any."""
        self._answers, self._how, self._heads = answers or Answers(models.target, how), how, heads
        # One token more than is kept: a head judges a token once the forward behind it has read it.
        self._keep = _Keep(how.depth + 1)
        self._drafter = build_chain(models, drafter, self._keep)

    @torch.inference_mode()
    def __call__(self, prompt: BenchPrompt, number: int) -> ChainRollouts:
        """number: of the answer, which seeds it."""
        how = self._how
        reading = self._answers.read(prompt, number, how.depth)
        rows = _ChainRows(reading, how.depth)
        for start, _ in walk(self._drafter, reading, prompt.prompt_ids, how, how.depth + 1, number):
            rows.add(start, self._keep.take(), keep_hidden=bool(self._heads))
        return rows.rollouts(self._heads)


class _ChainRows:
    """The arrays of one answer, filled round by round."""

    def __init__(self, reading: Reading, depth: int):
        self._reading, self._depth = reading, depth
        self._rounds, self._length = len(reading.answer.tokens) - 1, len(reading.answer.tokens)
        shape = (self._rounds, depth)
        self._token = np.full(shape, -1, np.int64)
        self._num_accepted, self._past_end = np.zeros(self._rounds, np.int64), np.zeros(self._rounds, np.int64)
        names = ("log_q", "log_max_q", "entropy", "accept_prob", "overlap")
        self._floats = {name: np.full(shape, np.nan) for name in names}
        self._was_read = np.zeros(shape, bool)
        self._hidden: list[Tensor] = []

    def add(self, start: int, views: Sequence[DraftView], keep_hidden: bool) -> None:
        """The round that begins before answer token `start`. The view of a token has read the one before it."""
        row, text = start - 1, self._reading.text
        self._was_read[row, : max(len(views) - 1, 0)] = True
        if keep_hidden:
            self._hidden += [view.hidden for view in views[1:]]
        views = views[: self._depth]
        if not views:
            return
        tokens = [view.token for view in views]
        self._token[row, : len(tokens)] = tokens
        accepted = num_equal(tokens, text.tokens[start:])
        self._num_accepted[row] = min(accepted, self._length - start)
        self._past_end[row] = accepted - self._num_accepted[row]
        laws = torch.stack([draft_law(view) for view in views])
        own = laws[torch.arange(len(tokens)), tokens].double()
        self._put(row, "log_q", own.log())
        self._put(row, "log_max_q", laws.amax(-1).double().log())
        self._put(row, "entropy", -torch.xlogy(laws, laws).sum(-1))
        # Down to and with the first rejected token, within the answer.
        judged = min(accepted + 1, len(tokens), self._length - start)
        if text.laws is None:
            same = torch.arange(judged) < accepted
            self._put(row, "accept_prob", same)
            self._put(row, "overlap", same)
        else:
            p = text.laws[start : start + judged]
            at_token = p[torch.arange(judged), tokens[:judged]].double()
            self._put(row, "accept_prob", (at_token / own[:judged]).clamp_max(1))
            self._put(row, "overlap", torch.minimum(p, laws[:judged]).sum(-1))

    def _put(self, row: int, name: str, values: Tensor) -> None:
        self._floats[name][row, : len(values)] = values.double().cpu().numpy()

    def rollouts(self, heads: Mapping[str, AcceptanceHead]) -> ChainRollouts:
        logits: dict[str, Floats] = {}
        for label, head in heads.items():
            logits[label] = np.full(self._token.shape, np.nan)
            if self._hidden:
                logits[label][self._was_read] = head(torch.stack(self._hidden)).double().cpu().numpy()
        return ChainRollouts(
            answers=[self._reading.answer],
            answer=np.zeros(self._rounds, np.int64),
            start=np.arange(1, self._length),
            token=self._token,
            num_accepted=self._num_accepted,
            **self._floats,
            heads=logits,
            past_end=self._past_end,
        )


def num_equal(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens that are the same. A coupled draft differs from the text exactly where it is rejected."""
    pairs = enumerate(zip(drafted, text, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(drafted), len(text)))

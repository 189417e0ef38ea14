"""Recording rollouts: the target answers once; then the production drafter drafts at every position of the answer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from draftsmith.data.models.naming import naming
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.along import accept_along
from draftsmith.eval.replay.chain_rows import ChainRows
from draftsmith.eval.replay.coupling import CoupledDraws, CoupledSource, ReadAnswer, TargetText
from draftsmith.eval.replay.rollouts import ChainRollouts, Rollouts, TargetAnswer, joined
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.branches import BranchDrafter, DraftModelBranches
from draftsmith.modules.decoding.loop import Generation, generate_one, room_for
from draftsmith.modules.decoding.protocols import Drafter, DraftTree, DraftView, Outcome
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.chains import build_chains
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.finite import blame
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

    def _generation(self, prompt: BenchPrompt, number: int) -> Generation:
        if number not in self._made:
            how, source = self._how, TorchSource(self._how.seed + number)
            self._made[number] = generate_one(
                self._target, None, prompt.prompt_ids, how.params, how.max_new_tokens, source, how.eos_ids
            )
        return self._made[number]

    def read(self, prompt: BenchPrompt, number: int, further: int) -> ReadAnswer:
        """number: of the answer, which seeds it. further: tokens after an end token that a round may still draft;
        whether the target would have gone on with them is counted there."""
        target, how, ids = self._target, self._how, prompt.prompt_ids
        made = self._generation(prompt, number)
        room = room_for(ids, how.max_new_tokens, target.info)
        answer = TargetAnswer(prompt.id, prompt.task, len(ids), made.tokens, made.ended, room)
        count = min(further, room - len(made.tokens)) if made.ended else 0
        session = target.session(1, len(ids) + len(made.tokens) + count, static=False)
        read = session.extend([[*ids, *made.tokens]], num_logits=len(made.tokens) + 1)
        tokens, rows = list(made.tokens), [read.logits[0]]
        source = TorchSource(seed_of(how.seed, number))
        for _ in range(count):
            last = rows[-1][-1]
            with blame("target", len(ids) + len(tokens)):
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
) -> Iterator[tuple[int, DraftTree]]:
    """(t, draft) of every round that begins before token t = 1, 2, ... of the answer, at most `count` tokens deep."""
    tokens, read = reading.answer.tokens, len(prompt)
    drafter.start([prompt], [reading.features[:read]], [tokens[0]])
    for start in range(1, len(tokens)):
        free = TorchSource(seed_of(how.seed, number, start))
        with blame(offset=read + start):
            (tree,) = drafter.propose([count], how.params, [CoupledSource(reading.text, start, free)])
        yield start, tree
        # The feature that predicts token t is that of the token before it.
        row = slice(read + start - 1, read + start)
        drafter.advance([Outcome((tokens[start],), 0, reading.features[row], reading.logits[start : start + 1])])


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
        drafter: str,
        how: Recording,
        heads: Mapping[str, AcceptanceHead],
        answers: TargetAnswers | None = None,
        along: bool = False,
        side_by_side: bool = False,
    ):
        """answers: those of other recordings of the same prompts, if there are any. along: sampling, ask the target
        of drafted tokens below the first rejection too, which takes a call or two an answer. side_by_side: draft from
        all places of an answer together, ten times as fast; logits then differ in the last bits from those of the
        decoder's own drafter, and greedy drafts where two tokens are that close."""
        self._answers, self._how, self._heads = answers or TargetAnswers(models.target, how), how, heads
        self._name = drafter
        # One token more than is kept: a head of state `after` predicts for a token once the forward behind it has read
        # it.
        self._keep = _Keep(how.depth + 1)
        self._drafter = build_chains(models, drafter, [self._keep])
        self._models, self._side_by_side = models, side_by_side
        self._target, self._along = models.target, along and not how.params.greedy
        self._embed = models.embedder(drafter).embed

    @torch.inference_mode()
    def __call__(self, prompt: BenchPrompt, number: int) -> ChainRollouts:
        """number: of the answer, which seeds it."""
        with naming([prompt.id]):
            return self._record(prompt, number)

    def _record(self, prompt: BenchPrompt, number: int) -> ChainRollouts:
        how = self._how
        reading = self._answers.read(prompt, number, how.depth)
        rows = ChainRows(reading, how.depth, how.params)
        if self._side_by_side and self._fits(prompt, reading):
            self._draft_together(prompt, number, reading, rows)
        else:
            for start, _ in walk(self._drafter, reading, prompt.prompt_ids, how, how.depth + 1, number):
                rows.add(start, self._keep.take(), keep_states=bool(self._heads))
        found = rows.rollouts(prompt.prompt_ids, self._heads, self._embed)
        if not self._along:
            return found
        return replace(found, accept_along=accept_along(self._target, prompt.prompt_ids, reading, how.params, found))

    def _fits(self, prompt: BenchPrompt, reading: ReadAnswer) -> bool:
        """No draft meets the end of the drafter's context; and there is one."""
        models, count = self._models, len(reading.answer.tokens)
        limits = [models.target.info.max_position]
        if self._name == "draft":
            assert models.draft is not None
            limits.append(models.draft.info.max_position)
        else:
            limits.append(models.heads[self._name].config.max_position)
        return count > 1 and len(prompt.prompt_ids) + count + self._how.depth + 1 <= min(limits)

    def _draft_together(self, prompt: BenchPrompt, number: int, reading: ReadAnswer, rows: ChainRows) -> None:
        depth, first = self._how.depth + 1, len(prompt.prompt_ids)
        answer = reading.answer.tokens
        models = self._models
        branches = branch_drafter(models, self._name, depth)
        # The last token is not needed: no round begins behind it.
        branches.open([*prompt.prompt_ids, *answer[:-1]], reading.features[: first + len(answer) - 1])
        draws = CoupledDraws(reading, depth, self._how.params, seed_of(self._how.seed, number, depth))
        drafted = branches.grow([first + start for start in range(1, len(answer))], depth, draws)
        known = {name: values[:, :-1] for name, values in draws.known.items()}
        rows.add_all(drafted, known, keep_states=bool(self._heads), ends=models.ends)


def branch_drafter(models: Models, drafter: str, depth: int) -> BranchDrafter:
    """Drafts of at most `depth` tokens from many places of a text."""
    if drafter != "draft":
        return models.heads[drafter].branches(models.target, depth)
    assert models.draft is not None
    return DraftModelBranches(models.draft, depth)

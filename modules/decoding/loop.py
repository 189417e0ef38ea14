"""The decoder's loop for one sequence: draft, score, verify, commit. Without a drafter it decodes autoregressively."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.decoding.drafter import Drafter, Outcome
from draftsmith.modules.decoding.plain import PromptAnswer, extend_answers, of_prompts
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.decoding.tree import MAX_NODES, NO_DRAFT, DraftTree
from draftsmith.modules.decoding.verify import Verdict, verify
from draftsmith.modules.sampling import Sampler, Source
from draftsmith.modules.targets.base import CausalLM, Session
from draftsmith.modules.types import SamplingParams


@dataclass(frozen=True)
class Generation:
    """Emitted tokens [N] and their cost. `ended`: the last one is an end token."""

    tokens: list[int]
    trace: DecodeTrace
    ended: bool


@dataclass(frozen=True)
class Round:
    """A finished round, for `on_round`.

    tokens: emitted, the first `num_accepted` of them drafted.
    tree, verdict, step, logits: the draft, the target's decision, the counts, and the target's logits [N + 1, V], whose
        row 0 scores the root's children. All are None for the prefill, which emits the first token.
    """

    tokens: list[int]
    num_accepted: int
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    step: DecodeStep | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class DecodeOptions:
    """Options of decoding that do not change the distribution of the tokens.

    on_round: called after every round.
    session: a session of the target to reuse, for its CUDA graphs, with room for this answer and the features that the
        drafter reads; None makes one.
    """

    on_round: Callable[[Round], None] | None = None
    session: Session | None = None


DEFAULTS = DecodeOptions()


def generate_one(
    target: CausalLM,
    drafter: Drafter | None,
    prompt: Sequence[int],
    params: SamplingParams,
    max_new_tokens: int,
    source: Source,
    eos_ids: Sequence[int] | None = None,
    options: DecodeOptions = DEFAULTS,
) -> Generation:
    """Generate up to `max_new_tokens` for a prompt. The output follows the target's distribution for any drafter.

    eos_ids: tokens that end the answer (and are kept in it); None takes the target's, () never ends.

    Raises:
        InputError: a prompt that is empty, has tokens unknown to the target, or leaves no room in its context.
        NonFinite: a model's numbers choose no token.
    """
    answer = PromptAnswer(target.info, prompt, max_new_tokens, source, eos_ids)
    decoder = Decoder(target, drafter, params, answer, options)
    decoder.begin()
    while not answer.done:
        decoder.round()
    return Generation(answer.tokens, answer.trace, answer.ended)


class Decoder:
    """Decodes the answer to one prompt, round by round."""

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        params: SamplingParams,
        answer: PromptAnswer,
        options: DecodeOptions = DEFAULTS,
    ):
        aux_layers, session = () if drafter is None else drafter.aux_layers, options.session
        # With room for everything kept, and one round's root and nodes.
        if session is None:
            longest = min(len(answer.prompt) + answer.room, target.info.max_position)
            session = target.session(1, longest + MAX_NODES + 1, aux_layers)
        if session.aux_layers != aux_layers:
            raise ValueError(f"session: captures {session.aux_layers}, and the drafter reads {aux_layers}")
        self._session, self._drafter, self._answer = session, drafter, answer
        self._sampler, self._on_round = Sampler(params, answer.source), options.on_round

    @torch.inference_mode()
    def begin(self) -> None:
        """Read the prompt and emit the first token, the target's own."""
        answer, drafter = self._answer, self._drafter
        self._session.reset(1)
        scores = self._session.extend([answer.prompt])
        with of_prompts([answer]):
            token, _ = self._sampler.draw(scores.logits[0, 0])
        answer.trace.prefill_emitted = 1
        appended = answer.emit([token])
        if self._on_round is not None:
            self._on_round(Round(appended, 0))
        if drafter is not None and not answer.done:
            with of_prompts([answer]):
                drafter.start(answer.prompt, scores.features[0, : len(answer.prompt)], token)

    @torch.inference_mode()
    def round(self) -> None:
        """Run one round of an unfinished answer; a GPU runs several if neither a drafter nor `on_round` looks at each.

        Raises:
            NonFinite: see `generate_one`.
        """
        with of_prompts([self._answer]):
            if self._drafter is None and self._on_round is None:
                extend_answers(self._session, [self._answer], self._sampler.params)
            else:
                self._one_round()

    def _one_round(self) -> None:
        """Draft, score, verify and commit."""
        answer, session, drafter, sampler = self._answer, self._session, self._drafter, self._sampler

        # Draft, but not past the last token wanted, whose value the round's own token gives. (The context has room for
        # an answer, so no node outruns it.)
        limit = min(answer.room - len(answer.tokens) - 1, MAX_NODES)
        tree = NO_DRAFT if drafter is None or limit < 1 else drafter.propose(limit, sampler)

        # Score the root and the tree's nodes, in one call of the target.
        fed = [answer.tokens[-1], *tree.tokens]
        parents = None if tree.is_chain else [[-1, *[parent + 1 for parent in tree.parents]]]
        scores = session.extend([fed], parents, logits_to_keep=len(fed))
        logits = scores.logits[0, : len(fed)]  # [N + 1, V]
        verdict = verify(tree, logits, sampler)

        # Commit: emit, keep the root and the accepted nodes in the target's cache, and tell the drafter.
        path = verdict.path
        emitted = [*map(tree.tokens.__getitem__, path), verdict.next_token]
        appended, num_accepted = answer.emit(emitted), len(path)
        step = DecodeStep(len(tree.tokens), num_accepted, len(appended), tree.draft_calls if tree.tokens else 0)
        answer.trace.steps.append(step)
        if self._on_round is not None:
            self._on_round(Round(appended, min(num_accepted, len(appended)), tree, verdict, step, logits))
        first = session.lengths[0] - len(tree.tokens)  # the slots from here on hold the nodes
        session.keep([first], [[first + node for node in path]])
        if drafter is not None and not answer.done:
            drafter.advance(Outcome(tuple(emitted), num_accepted, _of_path(scores.features[0], path), logits))


def _of_path(features: Tensor, path: Sequence[int]) -> Tensor:
    """Select the states of the root and of an accepted path from those of the root and all nodes."""
    count = len(path) + 1
    if path and path[-1] != count - 2:
        return features[[0, *(node + 1 for node in path)]]
    return features[:count]  # a contiguous path is a slice, which costs nothing

"""The decoder's only loop: draft, score, verify, commit. Autoregressive decoding is the loop without a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.decoding.protocols import Drafter, DraftTree, Outcome, Source, Verdict
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.finite import blame
from draftsmith.modules.targets.base import CausalLM, Scores, Session
from draftsmith.modules.types import InputError, SamplingParams

EMPTY = DraftTree((), ())


@dataclass(frozen=True)
class Generation:
    """Emitted tokens [N], and what they cost. `ended`: the last one is an end token."""

    tokens: list[int]
    trace: DecodeTrace
    ended: bool


@dataclass(frozen=True)
class Round:
    """What `on_round` sees: the tokens a round emitted, of which the first `num_accepted` had been drafted.

    tree, verdict and step: what was drafted, what the target decided, and the counts; logits: [N+1, V] of the target,
    row 0 scores the root's children. None for the prefill, which emits the first token.
    """

    tokens: list[int]
    num_accepted: int
    tree: DraftTree | None = None
    verdict: Verdict | None = None
    step: DecodeStep | None = None
    logits: Tensor | None = None


def session_capacity(prompt_length: int, max_new_tokens: int, max_nodes: int) -> int:
    """Cache slots that a generation can need: everything kept, and one round's root and nodes."""
    return prompt_length + max_new_tokens + max_nodes + 1


@torch.inference_mode()
def generate(
    target: CausalLM,
    drafter: Drafter | None,
    prompt: Sequence[int],
    params: SamplingParams,
    max_new_tokens: int,
    source: Source,
    eos_ids: Sequence[int] | None = None,
    on_round: Callable[[Round], None] | None = None,
    max_nodes: int = 128,
    session: Session | None = None,
) -> Generation:
    """Generate up to `max_new_tokens`; the output follows the target's law whatever the drafter does.

    eos_ids: tokens that end the answer (kept in it); None takes the target's, () never ends.
    max_nodes: most drafted tokens that the target scores in one call.
    session: one of the target's to use again, for the graphs that it holds; None makes one.

    Raises:
        InputError: empty prompt, or a prompt that leaves no room in the target's context.
        NonFinite: a model gave numbers that choose no token.
    """
    limit = target.info.max_position
    ends = frozenset(target.info.eos_ids if eos_ids is None else eos_ids)
    room = room_for(prompt, max_new_tokens, limit)
    if session is None:
        session = target.session(min(session_capacity(len(prompt), room, max_nodes), limit + max_nodes + 1))
    session.keep(0)
    state = _State(session, ends, room, on_round)

    scores = session.extend(prompt)
    with blame("target", len(prompt)):
        first = verify(EMPTY, scores.logits, params, source).next_token
    assert first is not None
    state.trace.prefill_emitted = 1
    state.show(Round(state.emit([first]), 0))
    if drafter is not None and not state.done:
        drafter.start(prompt, scores.features, first)
    while not state.done:
        with blame("target", session.length + 1):  # a drafter's errors bear its name when they come here
            _round(state, drafter, params, source, limit, max_nodes)
    return Generation(state.tokens, state.trace, state.ended)


def room_for(prompt: Sequence[int], max_new_tokens: int, limit: int) -> int:
    """Most tokens that may follow the prompt in a context of `limit`.

    Raises:
        InputError: as `generate` does.
    """
    if not 0 < len(prompt) < limit:
        raise InputError(
            "prompt", f"{len(prompt)} tokens", f"1 to {limit - 1}, the target's context", "Shorten the prompt."
        )
    if max_new_tokens < 1:
        raise InputError("max_new_tokens", max_new_tokens, "1 or more", "Ask for at least one token.")
    return min(max_new_tokens, limit - len(prompt))


class Answer:
    """Emitted tokens, what they cost, and whether generation is over."""

    def __init__(self, ends: frozenset[int], room: int):
        self.ends, self.room = ends, room
        self.tokens: list[int] = []
        self.trace = DecodeTrace()
        self.ended = False

    @property
    def done(self) -> bool:
        return self.ended or len(self.tokens) >= self.room

    def emit(self, tokens: list[int]) -> list[int]:
        """Append, cut at the first end token and at the limit; what was appended."""
        for i, token in enumerate(tokens):
            if token in self.ends:
                tokens, self.ended = tokens[: i + 1], True
                break
        if len(self.tokens) + len(tokens) > self.room:
            tokens = tokens[: self.room - len(self.tokens)]
            self.ended = tokens[-1] in self.ends
        self.tokens += tokens
        return tokens


class _State(Answer):
    """An answer, the session that it is read into, and who watches."""

    def __init__(self, session: Session, ends: frozenset[int], room: int, on_round: Callable[[Round], None] | None):
        super().__init__(ends, room)
        self.session, self.on_round = session, on_round

    def show(self, done: Round) -> None:
        if self.on_round is not None:
            self.on_round(done)


def _round(
    state: _State, drafter: Drafter | None, params: SamplingParams, source: Source, limit: int, max_nodes: int
) -> None:
    session, root = state.session, state.tokens[-1]
    kept = session.length
    # A draft may not outrun the context: node positions go up to kept + depth. Nor is there any use in drafting past
    # the last token wanted, whose value the round's own token gives.
    max_drafted = min(state.room - len(state.tokens) - 1, limit - kept - 1, max_nodes)
    tree = EMPTY if drafter is None or max_drafted < 1 else drafter.propose(max_drafted, params, source)
    count = len(tree.tokens)
    scores = read(session, root, tree)
    verdict = verify(tree, scores.logits, params, source)
    read_path = [node for node in verdict.path if node < tree.num_read]
    session.keep(kept + 1, [kept + 1 + node for node in read_path])
    emitted = [tree.tokens[node] for node in verdict.path]
    emitted += [] if verdict.next_token is None else [verdict.next_token]
    appended = state.emit(emitted)
    calls = drafter.draft_calls if drafter is not None and count else 0
    step = DecodeStep(tree.num_drafted, len(verdict.path), len(appended), calls)
    state.trace.steps.append(step)
    state.show(Round(appended, min(len(verdict.path), len(appended)), tree, verdict, step, scores.logits))
    if drafter is not None and not state.done:
        count = len(read_path) + 1
        if read_path == list(range(count - 1)):  # a slice costs nothing
            features = scores.features[:count]
        else:
            features = scores.features[[0, *(node + 1 for node in read_path)]]
        drafter.advance(Outcome(tuple(emitted), len(verdict.path), features, scores.logits))


def read(session: Session, root: int, tree: DraftTree) -> Scores:
    """One target call: the root and the tree's nodes, all of them with logits."""
    fed = [root, *tree.tokens[: tree.num_read]]
    if tree.is_chain:
        return session.extend(fed, num_logits=len(fed))
    parents = [-1, *(parent + 1 for parent in tree.parents)]
    return session.extend(fed, parents, num_logits=len(fed))

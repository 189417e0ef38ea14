"""Record the draft that begins at every position of the target's responses.

The target responds to a prompt once: that is the text X. A round that begins at position t drafts y_1, y_2, ...;
token d is compared to X_{t+d-1}, so the target's verdicts follow from X. Greedy, a token is accepted where it equals X.
Sampling, X ~ p is given first and the draft is drawn to fit: with x = X_{t+d-1} the draft is x with probability
min(1, q(x)/p(x)), else y ~ norm((q - p)+). Summed over X this is y ~ q, accepted with probability min(1, p(y)/q(y)),
where X is the target's own token after a rejection (a maximal coupling; Leviathan et al. 2023, algorithm 1). One
uniform number per position decides for every round that reaches it. What any stop rule does is then read off the
rollouts (replay.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.drafter import Drafter, Outcome
from draftsmith.modules.decoding.loop import Generation, generate_one
from draftsmith.modules.decoding.plain import room_for
from draftsmith.modules.decoding.stop import DraftView, FixedLengthStop
from draftsmith.modules.decoding.tree import DraftTree, num_candidates
from draftsmith.modules.drafters.branches import BranchedText, pieces, target_states
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import DynamicTreeMethod, build_chains
from draftsmith.modules.finite import name_nonfinite
from draftsmith.modules.sampling import Sampler, Source, TorchSource, best_token, entropies, probabilities, residual
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TargetAnswer:
    """The target's response to one prompt. room: the most tokens that it could have had, which limits late drafts."""

    id: str
    task: str
    prompt_tokens: int
    tokens: list[int]
    ended: bool
    room: int


@dataclass(frozen=True)
class ChainRollouts:
    """S rounds that begin everywhere in the responses, each drafted K tokens deep whatever the target accepts.

    The rounds of a response are consecutive, with starts 1 .. len(tokens) - 1; the first token is the prefill's. Where
    the drafter's context ends, drafts are shorter: token is -1 there, and the floats are NaN.

    Attributes:
        answer [S]: number of the response.
        start [S]: tokens of the response before the round.
        token [S, K]: drafted tokens, along X until the first rejection and then as the draft itself continues.
        num_accepted [S]: accepted tokens of a draft of K tokens, not beyond X.
        log_q, entropy [S, K]: of the distribution that the token was drawn from (greedy: the softmax).
        accept_prob [S, K]: min(1, p/q), greedy 1 or 0, up to the first rejected token; NaN after it and beyond X.
        past_end [S]: drafted tokens accepted after X's end token. A decoder counts them, though it never emits them.
        heads: raw logits [S, K] of each acceptance head; NaN where the head has not read the token.
        accept_along [S, K]: min(1, p/q) with the target reading the draft itself, so after a rejection too; optional.
    """

    answers: list[TargetAnswer]
    answer: Ints
    start: Ints
    token: Ints
    num_accepted: Ints
    log_q: Floats
    entropy: Floats
    accept_prob: Floats
    past_end: Ints
    heads: Mapping[str, Floats] = field(default_factory=dict)
    accept_along: Floats | None = None

    @property
    def depth(self) -> int:
        return self.token.shape[1]

    def verified(self) -> NDArray[np.bool_]:
        """Return the mask [S, K] of tokens with a label: those up to the first rejected one, within X."""
        return ~np.isnan(self.accept_prob)

    def available(self) -> Ints:
        """Return how many tokens the drafter could draft [S]: K except near the end of its context."""
        return (self.token >= 0).sum(1)


@dataclass(frozen=True)
class TreeRollouts:
    """S rounds as in `ChainRollouts`, each with all candidates of an EAGLE-2 tree of one `topk`.

    Attributes:
        rank [S, D, D]: for trees of at most d+1 levels ([:, d]), the rank by value of the candidate on X at level j+1
            among all candidates of these levels; -1 where no candidate is on X. A tree of m nodes holds exactly the
            candidates of rank < m, so it accepts as many levels as consecutive ranks are below m.
        levels [S]: levels that the drafter's context allowed, at most D.
    """

    answers: list[TargetAnswer]
    answer: Ints
    start: Ints
    topk: int
    rank: Ints
    levels: Ints

    @property
    def depth(self) -> int:
        """Times that nodes were expanded: one less than the D levels."""
        return self.rank.shape[1] - 1


Rollouts = TypeVar("Rollouts", ChainRollouts, TreeRollouts)


@dataclass(frozen=True)
class Recording:
    """How responses are made. depth: drafted tokens kept of every round, or times that a tree is expanded.

    Response number i has the seed `seed` + i, as in the bench.
    """

    params: SamplingParams
    depth: int
    max_new_tokens: int
    seed: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class TargetText:
    """The target's tokens [n], the distributions [n, V] that they were drawn from (None if greedy), and uniforms."""

    tokens: list[int]
    distributions: Tensor | None
    uniforms: list[float]


@dataclass(frozen=True)
class ReadAnswer:
    """A response of n tokens as the target read it.

    Attributes:
        text: the response, and what the target would continue with after its end token.
        features [P + n, F]: of the P prompt tokens and the response, or of the captured layers.
        logits [n, V]: row i predicts response token i.
    """

    answer: TargetAnswer
    text: TargetText
    features: Tensor
    logits: Tensor


class CoupledSource:
    """Source that draws one round's draft coupled with the text, from token `start` on (see the module's docstring).

    After a rejection, and beyond the text, `free` draws.
    """

    def __init__(self, text: TargetText, start: int, free: Source):
        self._text, self._place, self._free = text, start, free
        self._on_text = True

    def accept(self, prob: float) -> bool:
        raise AssertionError("a drafter only draws; the text decides what is accepted")

    def draw(self, probs: Tensor) -> int:
        place = self._place
        self._place += 1
        distributions, tokens = self._text.distributions, self._text.tokens
        if not self._on_text or distributions is None or place >= len(tokens):
            return self._free.draw(probs)
        token, distribution = tokens[place], distributions[place]
        # Uniform < q/p: the draft is the text's token. p(x) min(1, q/p) = min(p, q) = q(x) min(1, p/q).
        if self._text.uniforms[place] * distribution[token].item() < probs[token].item():
            return token
        self._on_text = False
        return self._free.draw(residual(probs, distribution))


class TargetAnswers:
    """The target's own responses, as decoding without a drafter gives them; each is generated once."""

    def __init__(self, target: CausalLM, how: Recording):
        self._target, self._how = target, how
        self._generated: dict[int, Generation] = {}

    def read(self, prompt: BenchPrompt, number: int, further: int, aux_layers: tuple[int, ...] = ()) -> ReadAnswer:
        """Return response `number` with the target's features and logits.

        further: tokens after an end token that a round may still draft. aux_layers: layers that the drafter reads.
        """
        target, how, ids = self._target, self._how, prompt.prompt_ids
        if number not in self._generated:
            source = TorchSource(how.seed + number)
            self._generated[number] = generate_one(
                target, None, ids, how.params, how.max_new_tokens, source, how.eos_ids
            )
        generation = self._generated[number]
        tokens = list(generation.tokens)
        room = room_for(ids, how.max_new_tokens, target.info)
        answer = TargetAnswer(prompt.id, prompt.task, len(ids), generation.tokens, generation.ended, room)

        count = min(further, room - len(tokens)) if generation.ended else 0
        session = target.session(1, len(ids) + len(tokens) + count, aux_layers, static=False)
        read = session.extend([[*ids, *tokens]], logits_to_keep=len(tokens) + 1)
        source, rows = TorchSource(seed_of(how.seed, number)), [read.logits[0]]
        for _ in range(count):  # beyond the end token: a decoder counts what it accepts there
            last = rows[-1][-1]
            tokens.append(best_token(last) if how.params.greedy else source.draw(probabilities(last, how.params)))
            rows.append(session.extend([tokens[-1:]]).logits[0])
        logits = torch.cat(rows)[: len(tokens)]
        distributions = None if how.params.greedy else probabilities(logits, how.params)
        text = TargetText(tokens, distributions, [source.uniform() for _ in tokens])
        return ReadAnswer(answer, text, read.features[0], logits)


def seed_of(*numbers: int) -> int:
    """Return one seed from several numbers."""
    return zlib.crc32(repr(numbers).encode())


def walk(
    drafter: Drafter, reading: ReadAnswer, prompt: Sequence[int], how: Recording, count: int, number: int
) -> Iterator[DraftTree]:
    """Yield the draft of every round that begins before response token 1, 2, ..., at most `count` tokens deep."""
    tokens, read = reading.answer.tokens, len(prompt)
    drafter.start(prompt, reading.features[:read], tokens[0])
    for start in range(1, len(tokens)):
        free = TorchSource(seed_of(how.seed, number, start))
        tree = drafter.propose(count, Sampler(how.params, CoupledSource(reading.text, start, free)))
        yield tree
        # The feature that predicts token t belongs to the token before it.
        row = slice(read + start - 1, read + start)
        drafter.advance(Outcome((tokens[start],), 0, reading.features[row], reading.logits[start : start + 1]))


def record_all(recorder: Callable[[BenchPrompt, int], Rollouts], prompts: Sequence[BenchPrompt]) -> Rollouts:
    """Record all prompts and join their rollouts."""
    return join([recorder(prompt, number) for number, prompt in enumerate(prompts)])


def join(parts: Sequence[Rollouts]) -> Rollouts:
    """Concatenate rollouts by one drafter, of one depth and with the same heads."""
    first, arrays = parts[0], dict[str, Any]()
    for item in fields(first):
        value = getattr(first, item.name)
        if isinstance(value, np.ndarray):
            arrays[item.name] = np.concatenate([getattr(part, item.name) for part in parts])
        elif isinstance(value, Mapping):
            arrays[item.name] = {k: np.concatenate([getattr(part, item.name)[k] for part in parts]) for k in value}
    before = np.cumsum([0, *(len(part.answers) for part in parts)])
    arrays["answer"] = np.concatenate([part.answer + n for part, n in zip(parts, before, strict=False)])
    return replace(first, answers=[answer for part in parts for answer in part.answers], **arrays)


class ChainRecorder:
    """Records chains with one drafter, the decoder's own, one response after another."""

    def __init__(
        self,
        models: Models,
        drafter: str,
        how: Recording,
        heads: Mapping[str, AcceptanceHead],
        answers: TargetAnswers | None = None,
        along: bool = False,
    ):
        """answers: of other recordings of the same prompts. along: if sampling, also ask the target about drafted
        tokens after the first rejection."""
        self._models, self._how, self._heads = models, how, heads
        self._answers = answers or TargetAnswers(models.target, how)
        self._along = BranchedText(models.target, how.depth) if along and not how.params.greedy else None
        # One token more than is kept: the state after a token exists once the next forward has read it.
        self._drafter = build_chains(models, drafter, FixedLengthStop(how.depth + 1))
        self._views = list[DraftView]()
        self._drafter.on_token = lambda view: self._views.append(view)  # a new list each round

    @torch.inference_mode()
    def __call__(self, prompt: BenchPrompt, number: int) -> ChainRollouts:
        """number: of the response, which seeds it."""
        depth = self._how.depth
        with name_nonfinite([prompt.id]):
            reading = self._answers.read(prompt, number, depth, self._drafter.aux_layers)
            shape = (len(reading.answer.tokens) - 1, depth)  # [S, K]
            token, read = np.full(shape, -1, np.int64), np.zeros(shape, bool)
            columns: dict[str, Floats] = {}
            states: list[Tensor] = []  # once the drafter has read the tokens
            for row, _ in enumerate(walk(self._drafter, reading, prompt.prompt_ids, self._how, depth + 1, number)):
                views, self._views = self._views, []
                kept = views[:depth]
                if not kept:
                    continue
                read[row, : len(views) - 1] = True
                states += [view.hidden for view in views[1:]] if self._heads else []
                drafted = torch.tensor([view.token for view in kept])
                distributions = torch.stack([view.distribution for view in kept])  # [k, V]
                token[row, : len(kept)] = drafted
                places = row + 1 + torch.arange(len(kept))
                drafted = drafted.to(distributions.device)
                for name, values in confidence_columns(distributions, drafted, reading.text, places).items():
                    columns.setdefault(name, np.full(shape, np.nan))[row, : len(kept)] = values.cpu().numpy()

            rollouts = chain_rollouts(reading, token, columns)
            logits = {name: np.full(shape, np.nan) for name in self._heads}
            for name, own in logits.items():
                if states:
                    own[read] = self._heads[name](torch.stack(states)).double().cpu().numpy()
            rollouts = replace(rollouts, heads=logits)
            if self._along is None:
                return rollouts
            along = accept_along(self._along, self._models.target, prompt.prompt_ids, self._how.params, rollouts)
            return replace(rollouts, accept_along=along)


def confidence_columns(distributions: Tensor, tokens: Tensor, text: TargetText, places: Tensor) -> dict[str, Tensor]:
    """Return columns of `ChainRollouts` for tokens [s] drawn from distributions [s, V] at places [s] of the text."""

    def of_token(rows: Tensor) -> Tensor:
        return rows.gather(1, tokens[:, None])[:, 0].double()  # [s]

    q = of_token(distributions)
    columns = {
        "log_q": q.log(),
        "entropy": entropies(distributions).double(),
    }
    if text.distributions is not None:
        target = text.distributions[places.clamp(max=len(text.tokens) - 1)]
        columns["accept_prob"] = (of_token(target) / q).clamp_max(1)
    return columns


def chain_rollouts(reading: ReadAnswer, token: Ints, columns: Mapping[str, Floats]) -> ChainRollouts:
    """Compare the drafts [S, K] that begin everywhere in one response with its text.

    columns: `log_q` and so on [S, K]. Without `accept_prob` a token is accepted where it equals the text.
    """
    text, count = np.array(reading.text.tokens), len(token)
    start, offset = np.arange(1, count + 1), np.arange(token.shape[1])
    place = start[:, None] + offset  # [S, K]
    same = (place < len(text)) & (token == text[np.minimum(place, len(text) - 1)])
    equal = same.cumprod(1).sum(1)  # a coupled draft differs from the text exactly where it is rejected
    left = count + 1 - start
    accepted = np.minimum(equal, left)
    labeled = (offset <= equal[:, None]) & (offset < left[:, None])
    drafted = token >= 0

    def column(name: str) -> Floats:
        return np.where(drafted, columns.get(name, np.nan), np.nan)

    return ChainRollouts(
        answers=[reading.answer],
        answer=np.zeros(count, np.int64),
        start=start,
        token=token,
        num_accepted=accepted,
        log_q=column("log_q"),
        entropy=column("entropy"),
        accept_prob=np.where(labeled & drafted, columns.get("accept_prob", same), np.nan),
        past_end=equal - accepted,
    )


def accept_along(
    text: BranchedText, target: CausalLM, prompt: list[int], params: SamplingParams, rollouts: ChainRollouts
) -> Floats:
    """Return min(1, p(y)/q(y)) [S, K] of one response's rounds, with p after the drafted tokens before y.

    NaN beyond a draft's end and beyond the target's context.
    """
    (answer,), first = rollouts.answers, len(prompt)
    found = rollouts.accept_prob.copy()
    room = np.minimum(target.info.max_position - first - rollouts.start, rollouts.depth)
    text.open([*prompt, *answer.tokens[:-1]])  # no round begins after the last token
    for depth in np.unique(room[room > 0]).tolist():  # near the end of the context drafts are shorter
        rows = np.flatnonzero(room == depth)
        for group in (rows[piece] for piece in pieces(len(rows), text.group)):
            token = torch.from_numpy(rollouts.token[group, :depth])  # [s, k]
            drafted = token.clamp_min(0)
            states = target_states(text, (first + rollouts.start[group]).tolist(), drafted)
            p = probabilities(target.lm_head(states), params)  # [s, k, V]
            p_token = p.gather(-1, drafted[..., None].to(p.device))[..., 0].double().cpu().numpy()
            ratio = np.minimum(p_token / np.exp(rollouts.log_q[group, :depth]), 1.0)
            missing = np.isnan(found[group, :depth]) & (token.numpy() >= 0)
            found[group, :depth] = np.where(missing, ratio, found[group, :depth])
    return found


class TreeRecorder:
    """Records the candidates of dynamic trees of one width, one response after another."""

    def __init__(self, models: Models, method: DynamicTreeMethod, how: Recording, answers: TargetAnswers | None = None):
        """method: gives topk and values; trees of any size are replayed from one recording."""
        assert method.topk <= models.target.info.vocab_size
        self._answers, self._how, self._topk = answers or TargetAnswers(models.target, how), how, method.topk
        self._drafter = method.fixed(models, num_candidates(method.topk, how.depth + 1), how.depth)

    @torch.inference_mode()
    def __call__(self, prompt: BenchPrompt, number: int) -> TreeRollouts:
        """number: of the response, which seeds it."""
        how, topk, num_levels = self._how, self._topk, self._how.depth + 1
        with name_nonfinite([prompt.id]):
            reading = self._answers.read(prompt, number, num_levels, self._drafter.aux_layers)
            count = len(reading.answer.tokens) - 1
            rank, levels = np.full((count, num_levels, num_levels), -1, np.int64), np.zeros(count, np.int64)
            for row, tree in enumerate(walk(self._drafter, reading, prompt.prompt_ids, how, num_levels, number)):
                # The inverse of num_candidates: near the end of the context trees are shallower.
                levels[row] = 0 if not tree.tokens else 1 + (len(tree.tokens) // topk - 1) // topk
                assert num_candidates(topk, int(levels[row])) == len(tree.tokens)
                path = path_along(tree, reading.text.tokens[row + 1 :])
                rank[row, : levels[row]] = path_ranks(tree, path, topk, num_levels)[: levels[row]]
        start = np.arange(1, count + 1)
        return TreeRollouts([reading.answer], np.zeros(count, np.int64), start, topk, rank, levels)


def path_along(tree: DraftTree, text: Sequence[int]) -> list[int]:
    """Return the nodes that a text passes through, from its first token on."""
    nodes = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    for token in text:
        node = nodes.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def path_ranks(tree: DraftTree, path: Sequence[int], topk: int, num_levels: int) -> Ints:
    """Return [D, D]: row d ranks the path's nodes among the candidates of the first d + 1 levels, by value.

    Among equal values the lowest node number comes first; -1 where the path has no node.
    """
    values, found = np.array(tree.values), np.full((num_levels, num_levels), -1, np.int64)
    sizes = np.array([num_candidates(topk, levels) for levels in range(1, num_levels + 1)])
    number = np.arange(len(values))
    for level, node in enumerate(path):
        before = (values > values[node]) | ((values == values[node]) & (number < node))
        up_to = np.concatenate([[0], before.cumsum()])[np.minimum(sizes, len(values))]
        found[level:, level] = up_to[level:]
    return found

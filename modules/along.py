"""Drafts along a recorded text, and how many of their tokens are accepted, without decoding.

`Text` is a text with the states of its target: read by the target in this process or by the server that runs it
(`Text.read`), or of states that are stored (`Text.of`). `Text.open` gives it to a `BranchDrafter`, which then drafts
from any places: greedily, drawn (`draft`), or with tokens that the caller draws from the logits (`grow`).

What is kept depends on what drafts are compared with. `kept_greedily` takes the first choices of the target, which has
read the text and not the drafts (`read`). data/labels.py lets the target read the drafts, too. An `AlongDrafter` counts
drafts only as far as they are the text, and walks over each answer as decoding would: `tau_of` its `Walk`s is
decoding's, and so is what is accepted by place (`rounds_by_place`).

Decoding walks over an answer: a round begins where the last one ended. Given an answer x that follows the target's
distribution p, its rounds are random in a known way. A round that drafts from q accepts x_1 .. x_i, or more, with the
probability w_i q(x_1 .. x_i) (decoding/verify.py), and emits them in any way with p(x_1 .. x_i): given x, with
w_i q / p, which is the least q(x_1 .. x_j) / p(x_1 .. x_j) of all j up to i, and at most 1, whatever comes behind.
Drafts count only as far as they are the answer, so no other branch is read. `visits` adds up how often a round begins
at each place; their sum is the mean number of rounds that decode this answer. Its mean over answers is decoding's,
without decoding's own randomness, and tau is the same ratio of sums. Greedily all probabilities are 0 and 1, and the
rounds are decoding's. The mean over all places would be another number: rounds begin more often where drafts fail.

S places of a text where a round may begin: all tokens of its answers but their first ones, which come from reading
prompts. K tokens of the longest draft, T tokens of the text, L lengths of drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.decoding.drafter import Outcome
from draftsmith.modules.decoding.trace import tau
from draftsmith.modules.drafters.block.drafter import SlotNet
from draftsmith.modules.drafters.branches import BranchDrafter, pieces
from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.modules.finite import NO_TOKEN, NonFinite, checked, first_broken
from draftsmith.modules.sampling import Sampler, TorchSource, best_tokens, entropies, probabilities
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.types import SamplingParams

LOGITS = 2**25  # that are computed at once


@dataclass(frozen=True)
class Answer:
    """Tokens [begin, end) of a text, of a target. limit: where decoding would have cut it."""

    begin: int
    end: int
    limit: int

    @property
    def starts(self) -> Tensor:
        """Places [S] where a round may begin."""
        return torch.arange(self.begin + 1, self.end)


@dataclass(frozen=True)
class Text:
    """Text of T tokens, some of answers, with the states that drafters read.

    states: [T, H] of the target after some layers, by their number.
    """

    ids: Sequence[int]
    answers: Sequence[Answer]
    states: dict[int, Tensor]

    @classmethod
    def of(cls, ids: Sequence[int], answers: Sequence[Answer], features: Tensor, layers: Sequence[int]) -> Text:
        """Take features [T, L*H] of these layers, on the device of those who read them."""
        return cls(ids, answers, dict(zip(layers, features.chunk(len(layers), -1), strict=True)))

    @classmethod
    @torch.inference_mode()
    def read(cls, target: CausalLM, ids: Sequence[int], answers: Sequence[Answer], layers: Sequence[int]) -> Text:
        """Let the target, or its server, read a text once, with the states after these layers; (): the final norm."""
        layers = sorted({*layers}) or [final_state(target.info.num_layers)]
        features = target.features(torch.tensor([ids], device=target.device), aux_layers=tuple(layers))[0]
        return cls.of(ids, answers, features, layers)

    @property
    def places(self) -> Tensor:
        """Places [N] of the answers' tokens; nothing tells of a text's first token."""
        return torch.cat([torch.arange(max(answer.begin, 1), answer.end) for answer in self.answers])

    def features(self, layers: Sequence[int], length: int) -> Tensor:
        """Return the states [length, L*H] that a drafter of these layers reads; () are those after the final norm."""
        return torch.cat([self.states[layer][:length] for layer in layers or (max(self.states),)], -1)

    def open(self, drafter: BranchDrafter, length: int, layers: Sequence[int] | None = None) -> BranchDrafter:
        """Let a drafter read the first tokens of the text, in place of the text that it read last.

        layers: in place of those that it was trained on.

        Raises:
            NonFinite: the states, for which a drafter's logits are not to blame.
        """
        features = None
        if drafter.reads_features:
            features = self.features(drafter.aux_layers if layers is None else layers, length)
            if (place := first_broken(features)) is not None:
                raise NonFinite("hidden states", "target", place)
        drafter.open([*self.ids[:length]], features)
        return drafter


@dataclass(frozen=True)
class TargetText(Text):
    """Text, N tokens of which are of answers, with what its target says of these.

    params: how they were sampled. prob: [T] float64, the probability of each token of an answer; 1 if greedy. best: [N]
    the target's first choices. foreign: [N] bool, the target would not choose the token: it is not its first choice, or
    has probability 0. surprise, entropy: [N] -log p, and its mean at this place.
    """

    params: SamplingParams
    prob: Tensor
    best: Tensor
    foreign: Tensor
    surprise: Tensor
    entropy: Tensor


@torch.inference_mode()
def read(
    target: CausalLM,
    ids: Sequence[int],
    answers: Sequence[Answer],
    params: SamplingParams,
    layers: Sequence[int],
    stored: Text | None = None,
) -> TargetText:
    """Read a text once, with the states after these layers and after the final norm.

    params: how its answers were sampled. stored: the text with these states; of the target only `lm_head` is used then.

    Raises:
        NonFinite: the target's logits.
    """
    tokens, last = torch.tensor(ids, device=target.device), final_state(target.info.num_layers)
    text = stored or Text.read(target, ids, answers, [*layers, last])
    states, places = text.states, text.places.to(target.device)  # [N]
    parts = [torch.empty(4, 0, dtype=torch.float64, device=target.device)]
    for piece in pieces(len(places), max(1, LOGITS // target.info.vocab_size)):
        own, logits = tokens[places[piece]], target.lm_head(states[last][places[piece] - 1])  # [n], [n, V]
        best = checked(best_tokens(logits), model="target")
        probs = probabilities(logits, SamplingParams(1.0) if params.greedy else params)  # [n, V]
        prob = probs.gather(-1, own[:, None])[:, 0].double()
        parts.append(torch.stack([prob, best, best != own if params.greedy else prob == 0, entropies(probs)]))
    chosen, first, foreign, entropy = torch.cat(parts, 1)
    prob = torch.ones(len(ids), dtype=torch.float64, device=target.device)
    if not params.greedy:
        prob[places] = chosen
    numbers = first.long().cpu(), foreign.cpu() > 0, -chosen.log().cpu(), entropy.cpu()
    return TargetText(ids, answers, states, params, prob, *numbers)


# -- drafts along a text

# (text, starts [S], limits [S]) -> odds [L, S, K] and lengths [S], see `AlongDrafter`.
Odds = Callable[[TargetText, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Walk:
    """Rounds of drafts of one length over an answer.

    visits: [S] how often a round begins at each place. drafted, reached: [S, K] probability that its draft has 1, 2, ..
    K tokens or more, and that so many or more are accepted. calls: [K] target calls by the length of drafts, prefill
    included. All are float64, on the CPU.
    """

    answer: Answer
    visits: Tensor
    drafted: Tensor
    reached: Tensor
    calls: Tensor

    @property
    def num_tokens(self) -> int:
        return self.answer.end - self.answer.begin


def tau_of(walks: Sequence[Walk]) -> float:
    """Return tau over answers."""
    return tau(sum(walk.num_tokens for walk in walks), float(sum(walk.calls[-1] for walk in walks)))


def rounds_by_place(walks: Sequence[Walk]) -> Tensor:
    """Return [2, K]: in how many rounds 1, 2, .. K tokens or more are accepted, and drafted; by place, their ratio is
    the share of accepted tokens."""
    return torch.stack([torch.stack([one.visits @ one.reached, one.visits @ one.drafted]) for one in walks]).sum(0)


@dataclass(frozen=True)
class AlongDrafter:
    """Drafter along texts, for its longest drafts.

    odds: of drafts from places [S] of at most limits [S] tokens, q / p [L, S, K] of each token of the text behind those
    before it (1 or 0 where nothing is drawn: whether it is the draft's), and the lengths [S] that the drafts have. L is
    K where drafts depend on how long they are to be, else 1. layers: whose states of the target it reads. stops: an end
    token ends a draft.
    """

    odds: Odds
    layers: tuple[int, ...]
    depth: int
    stops: bool

    def walk(self, seen: TargetText, lengths: Sequence[int]) -> list[list[Walk]]:
        """Return the walks over each answer of a text: one for each of these lengths of drafts, at most `depth`."""
        depth, starts = torch.arange(self.depth), [answer.starts for answer in seen.answers]
        # The last token that is allowed is the target's own. Drafts go past an end token that they do not foresee.
        limits = torch.cat([answer.limit - own - 1 for answer, own in zip(seen.answers, starts, strict=True)])
        left = torch.cat([answer.end - own for answer, own in zip(seen.answers, starts, strict=True)])
        odds, drafted = self.odds(seen, torch.cat(starts), limits.clamp(max=self.depth))
        used = depth < torch.minimum(torch.minimum(drafted, left), depth[:, None] + 1)[..., None]  # [K, S, K]
        # Logarithms, as products of odds overflow.
        reached = (odds * used).log().cumsum(-1).cummin(-1).values.clamp_max(0).exp()
        walks = []
        counts = [len(own) for own in starts]
        for answer, *parts in zip(
            seen.answers, reached.split(counts, 1), drafted.split(counts), left.split(counts), strict=True
        ):
            own, own_drafted, own_left = parts
            visited = visits(own)  # [K, S]
            answer_walks = []
            for length in lengths:
                kept, long = own[length - 1, :, :length], (depth[:length] < own_drafted[:, None]).double()
                if self.stops:  # at the end token, where all before it are accepted
                    long -= long * (depth[:length] >= own_left[:, None]) * whole(kept, own_left)[:, None]
                calls = 1 + visited[:length].sum(-1)
                answer_walks.append(Walk(answer, visited[length - 1], long, kept, calls))
            walks.append(answer_walks)
        return walks


def visits(reached: Tensor) -> Tensor:
    """Return how often a round begins at each of S places of an answer, [L, S], for L drafters.

    A round that accepts n tokens emits one more, and the next one begins behind that. The first begins at place 0.

    reached: [L, S, K] probability that a round accepts 1, 2, .. K tokens or more.
    """
    count, places, depth = reached.shape
    accepts = -F.pad(F.pad(reached, (1, 0), value=1.0), (0, 1)).diff(dim=-1)  # [L, S, K + 1], exactly 0, 1, .. K
    begun = reached.new_zeros(count, places + depth + 1)
    begun[:, :1] = 1
    for place in range(places):
        begun[:, place + 1 : place + depth + 2] += begun[:, place, None] * accepts[:, place]
    return begun[:, :places]


def whole(reached: Tensor, left: Tensor) -> Tensor:
    """Return the probability [S] that all tokens that are left [S] of an answer are accepted, of reached [S, K]."""
    depth = reached.shape[1]
    all_left = reached.gather(1, left.clamp(max=depth)[:, None] - 1)[:, 0]
    return torch.where(left <= depth, all_left, 0.0)


def along_lookup(depth: int, ngram: int) -> AlongDrafter:
    """Draft by prompt lookup."""
    return AlongDrafter(partial(lookup_odds, depth, ngram), (), depth, False)


def along_model(depth: int, draft: CausalLM, name: str) -> AlongDrafter:
    """Draft by a draft model."""
    return AlongDrafter(partial(model_odds, depth, draft, name), (), depth, True)


def along_head(depth: int, net: DraftNet, longest: int, shorter: bool = True) -> AlongDrafter:
    """Draft by a head's net. longest: text that it reads. shorter: walks of shorter drafts are wanted too."""
    # The slots of a block see each other: a longer one drafts otherwise.
    lengths = range(1, depth + 1) if shorter and isinstance(net, SlotNet) else [depth]
    return AlongDrafter(partial(head_odds, lengths, net, longest), net.aux_layers, depth, True)


def lookup_odds(depth: int, ngram: int, seen: TargetText, starts: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Look drafts up. Nothing is drawn, so that a token is accepted where it is the text's, at any temperature."""
    ids, drafter, sampler = [*seen.ids], PromptLookupDrafter(depth, ngram), Sampler(seen.params, TorchSource(0))
    odds, lengths = torch.zeros(1, len(starts), depth, dtype=torch.float64), torch.zeros_like(limits)
    before = -1
    for place, (start, limit) in enumerate(zip(starts.tolist(), limits.tolist(), strict=True)):
        if start != before + 1:
            drafter.start(ids[: start - 1], torch.empty(0), ids[start - 1])
        draft, before = drafter.propose(limit, sampler).tokens, start
        lengths[place] = len(draft)
        for level, (token, there) in enumerate(zip(draft, ids[start:], strict=False)):
            odds[0, place, level] = token == there
        drafter.advance(Outcome((ids[start],), 0, torch.empty(0), torch.empty(0)))
    return odds, lengths


@torch.inference_mode()
def model_odds(
    depth: int, draft: CausalLM, name: str, seen: TargetText, starts: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor]:
    """Read the text with a draft model: behind accepted drafts, which are the text, it drafts as behind the text."""
    ids = torch.tensor(seen.ids, device=draft.device)
    hidden, odds = draft.features(ids[None])[0], torch.zeros(len(ids) + depth, dtype=torch.float64)
    for piece in pieces(len(starts), max(1, LOGITS // draft.info.vocab_size)):
        at = starts[piece].to(draft.device)
        odds[starts[piece]] = odds_of(draft.lm_head(hidden[at - 1]), ids[at], seen, at, name)
    return odds[starts[:, None] + torch.arange(depth)][None], limits


def head_odds(
    lengths: Sequence[int], net: DraftNet, longest: int, seen: TargetText, starts: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor]:
    """Draft from each place of the text as the head does, in drafts of these lengths. longest: text that it reads."""
    ids, opened, depth = torch.tensor(seen.ids, device=net.device), min(len(seen.ids), longest), lengths[-1]
    # Near the end of its context the head drafts fewer tokens; here it drafts none.
    limits = torch.where((starts >= net.first_start) & (starts + depth <= longest), limits, 0)
    drafting = limits.nonzero()[:, 0]
    first = starts[drafting].to(net.device)
    odds = torch.zeros(len(lengths), len(starts), depth, dtype=torch.float64)

    def draw(row: int, piece: slice, level: int, logits: Tensor) -> Tensor:
        at = (first[piece] + level).clamp_max(len(ids) - 1)
        odds[row, drafting[piece], level] = odds_of(logits, ids[at], seen, at, net.name)
        return ids[at]

    for row, length in enumerate(lengths) if len(drafting) else ():
        seen.open(BranchDrafter(net, length), opened).grow(first.tolist(), length, partial(draw, row))
    return odds, limits


# -- what is kept


def odds_of(logits: Tensor, tokens: Tensor, seen: TargetText, at: Tensor, name: str) -> Tensor:
    """Return q / p of the text's tokens [N] at these places [N], from a drafter's logits [N, V]; greedily 1 or 0.

    Raises:
        NonFinite: the logits, of the drafter `name`.
    """
    if seen.params.greedy:
        return (checked(best_tokens(logits), model=name) == tokens).double().cpu()
    q = probabilities(logits, seen.params).gather(-1, tokens[:, None])[:, 0].double()
    checked(torch.where(q.isnan(), NO_TOKEN, 0), "probabilities", name)
    p = seen.prob[at.to(seen.prob.device)].to(q.device)
    # A token that the target never samples here was not sampled by it.
    return torch.where(p > 0, q / p, 0.0).cpu()


def kept_greedily(drafted: Tensor, starts: Tensor, seen: TargetText) -> Tensor:
    """Return [2, S, K]: which tokens of greedy drafts [S, K] are the target's first choice, and which were compared.

    A token is compared if it is in an answer and the draft before it was right and equal to the text.
    """
    ids, choices = torch.tensor(seen.ids), torch.full((len(seen.ids),), NO_TOKEN)
    choices[seen.places] = seen.best
    places = starts[:, None] + torch.arange(drafted.shape[1])
    there, inside = places.clamp_max(len(ids) - 1), places < len(ids)
    wanted = choices[there].where(inside, NO_TOKEN)
    hit = drafted == wanted
    continues = (hit & (drafted == ids[there])).cumprod(-1).bool()
    compared = (wanted >= 0) & torch.cat([torch.ones_like(continues[:, :1]), continues[:, :-1]], 1)
    return torch.stack([compared & hit, compared])

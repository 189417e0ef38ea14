"""`draftsmith eval bench --replay`: acceptance of drafters on recorded answers, without decoding.

Decoding walks over an answer: a round begins where the last one ended. Given an answer x that follows the target's
distribution p, its rounds are random in a known way. A round drafts y_i from q, accepts it with probability min(1, p/q)
and replaces the first one that it rejects. So x_i is emitted as an accepted draft with probability min(p, q)(x_i), and
in any way with p(x_i): given x_i, the draft was accepted with probability min(1, q(x_i) / p(x_i)), whatever came before
it. Drafts count only as far as they are the answer, so no other branch is read. `visits` adds up how often a round
begins at each place; their sum is the mean number of rounds that decode this answer. Its mean over answers is
decoding's, without decoding's own randomness, and tau is the same ratio of sums, tokens by target calls. Greedily all
probabilities are 0 and 1, and the rounds are decoding's. The mean over all places would be another number: rounds
begin more often where drafts fail.

S places of a text where a round may begin: all tokens of its answers but their first ones, which come from reading
prompts. K tokens of the longest draft, T tokens of the text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.data.console import progress_bar
from draftsmith.data.engines.served_target import load_target
from draftsmith.data.settings import MODEL, ROLES, check_left_out, check_not_negative, check_positive
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.recorded import LOGITS, Answer, TargetText, check_followed, read_recorded, read_text
from draftsmith.eval.bench.results import CONTEXTS, NUMBERS, Rounds, acceptance, classes_of, write_numbers
from draftsmith.eval.bench.runner import load_models
from draftsmith.eval.bench.tables import replay_tables
from draftsmith.eval.bootstrap import Floats, Resamples
from draftsmith.eval.meta import RESULTS, describe
from draftsmith.eval.settings import BenchConfig
from draftsmith.eval.tables import to_json
from draftsmith.modules.decoding.drafter import Outcome
from draftsmith.modules.drafters.block.drafter import SlotNet
from draftsmith.modules.drafters.branches import BranchDrafter, pieces
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import LabeledMethod
from draftsmith.modules.drafters.methods import FixedLengthMethod
from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.drafters.prompt_lookup import PromptLookupDrafter, PromptLookupMethod
from draftsmith.modules.finite import NO_TOKEN, checked, name_nonfinite
from draftsmith.modules.pretrained.card import WEIGHTS
from draftsmith.modules.pretrained.checkpoint import Checkpoint, checkpoint_of
from draftsmith.modules.pretrained.files import write_json
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.sampling import Sampler, TorchSource, best_tokens, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

Ints = NDArray[np.int64]
# (text, starts [S], limits [S]) -> chances [L, S, K] and lengths [S], see `ReplayedDrafter`.
Chances = Callable[[TargetText, Ints, Ints], tuple[Floats, Ints]]
# Options of decoding, which nothing reads here.
OF_DECODING = (
    *("prompts", "tasks", "mid", "acceptance", "turns", "contexts", "temperatures", "repeats", "traces"),
    *("card", "split", "keep_tasks", "max_new_tokens", "ignore_eos"),
)


@sole_writer()
def replay(config: BenchConfig, named: Sequence[LabeledMethod]) -> dict[str, Any]:
    """Measure, write the run's files, and return what results.json holds: meta, methods and tables.

    Raises:
        InputError: options of decoding, methods that are no chain of a fixed length, or answers that are not this
            target's.
    """
    check_left_out(config, OF_DECODING, "with --replay", "none: nothing is decoded")
    check_not_negative(config, "limit")
    check_positive(config, "num_threads")
    for item in named:
        if not isinstance(item.method, FixedLengthMethod | PromptLookupMethod):
            expected = "chains of a fixed length, such as spec:k=5 and eagle3:k=5, or pld"
            raise InputError("methods", f"{item.label} with --replay", expected, "Measure it with --prompts.")

    # Load.
    checkpoint = Checkpoint(config.target, config.trust_remote_code)
    texts, params = read_recorded(config, checkpoint)
    torch.set_num_threads(config.num_threads)
    loading, longest = config.loading, max(len(text.ids) for text in texts)
    target = load_target(checkpoint, **loading)
    loading.pop("server", None)
    if longest > (most := target.info.max_position):
        found = f"a text of {longest:,} tokens"
        raise InputError("replay", found, f"at most {most:,}, the target's context", "Leave it out.")
    models = load_models(named, config.paths, longest, params, target, **loading)
    drafters = make_drafters(named, models)

    # Replay text by text.
    layers = [layer for drafter in drafters for layer in drafter.layers]
    read, walks = list[TargetText](), {item.label: list[Walk]() for item in named}
    with progress_bar("replaying", len(texts), "texts") as progress:
        for number, text in enumerate(texts):
            with name_nonfinite([text.id]):
                seen = read_text(target, text, params, layers)
                for drafter in drafters:
                    drafter.walk(number, seen, walks)
            # The states are large, and nothing reads them again.
            read.append(dataclasses.replace(seen, states={}))
            progress(1)

    # Summarize and write.
    tasks = sorted({text.task for text in texts} - {""})
    heads = {key: path for key, path in config.paths.items() if key.partition("@")[0] not in (*ROLES, MODEL)}
    meta = describe(
        "bench",
        config,
        [BenchPrompt(text.id, text.ids) for text in texts],
        str(config.replay),
        seed=config.seed,
        target={**target.info.identity, **checkpoint_of(target).tokenizer_identity},
        heads={kind: {"path": path, "sha256": file_sha256(Path(path) / WEIGHTS)} for kind, path in heads.items()},
        sampling=dataclasses.asdict(params),
        answers=check_followed(read),
    )
    meta["kind"] = "replay"
    methods = [
        {
            "method": label,
            "temperature": params.temperature,
            **summarize(own, config.seed),
            "by_task": {task: summarize([walk for walk in own if walk.task == task], config.seed) for task in tasks},
        }
        for label, own in walks.items()
    ]
    results = {"meta": meta, "methods": methods, "tables": to_json(replay_tables(methods, meta))}
    write_numbers(config.output / NUMBERS, methods)
    write_json(config.output / RESULTS, results)
    return results


# -- rounds


@dataclass(frozen=True)
class Walk:
    """Rounds of one method over an answer in the text of this number.

    visits: [S] how often a round begins at each place. drafted: [S] mean number of tokens of its draft. reached: [S, K]
    probability that 1, 2, .. K of them or more are accepted. calls: [K] target calls by the length of drafts, prefill
    included.
    """

    text: int
    task: str
    answer: Answer
    visits: Floats
    drafted: Floats
    reached: Floats
    calls: Floats


def visits(reached: Floats) -> Floats:
    """Return how often a round begins at each of S places of an answer, [L, S], for L drafters.

    A round that accepts n tokens emits one more, and the next one begins behind that. The first begins at place 0.

    reached: [L, S, K] probability that a round accepts 1, 2, .. K tokens or more.
    """
    count, places, depth = reached.shape
    bounds = np.ones((count, places, 1)), reached, np.zeros((count, places, 1))
    accepts = -np.diff(np.concatenate(bounds, -1))  # [L, S, K + 1], exactly 0, 1, .. K
    begun = np.zeros((count, places + depth + 1))
    begun[:, :1] = 1
    for place in range(places):
        begun[:, place + 1 : place + depth + 2] += begun[:, place, None] * accepts[:, place]
    return begun[:, :places]


def whole(reached: Floats, left: Ints) -> Floats:
    """Return the probability [S] that all tokens that are left [S] of an answer are accepted, of reached [S, K]."""
    depth = reached.shape[1]
    return np.where(left <= depth, reached[np.arange(len(left)), np.minimum(left, depth) - 1], 0.0)


@dataclass(frozen=True)
class ReplayedDrafter:
    """Drafter, for the longest of its methods' drafts.

    chances: of drafts from places [S] of at most limits [S] tokens, the probability [L, S, K] that each token of the
    text is accepted if those before it are, and the lengths [S] that the drafts have. L is K where drafts depend on
    how long they are to be, else 1. layers: whose states of the target it reads. lengths: by the method's label. stops:
    an end token ends a draft.
    """

    chances: Chances
    layers: tuple[int, ...]
    lengths: Mapping[str, int]
    stops: bool

    def walk(self, number: int, seen: TargetText, walks: Mapping[str, list[Walk]]) -> None:
        """Append the walks over the answers of a text to those of each method."""
        text, depth = seen.text, np.arange(max(self.lengths.values()))  # [K]
        starts = [np.arange(answer.begin + 1, answer.end) for answer in text.answers]
        # The last token that is allowed is the target's own. Drafts go past an end token that they do not foresee.
        limits = [answer.limit - own - 1 for answer, own in zip(text.answers, starts, strict=True)]
        left = np.concatenate([answer.end - own for answer, own in zip(text.answers, starts, strict=True)])
        chances, drafted = self.chances(seen, np.concatenate(starts), np.concatenate(limits).clip(max=len(depth)))
        used = depth < np.minimum(np.minimum(drafted, left), depth[:, None] + 1)[..., None]  # [K, S, K], by the length
        reached = np.cumprod(chances * used, -1, np.float64)
        ends = np.cumsum(list(map(len, starts)))
        for answer, own, end in zip(text.answers, starts, ends, strict=True):
            part = slice(end - len(own), end)
            visited = visits(reached[:, part])  # [K, S]
            for label, length in self.lengths.items():
                kept, lengths = reached[length - 1, part, :length], drafted[part].clip(max=length)
                if self.stops:
                    lengths = lengths - (lengths - left[part]).clip(min=0) * whole(kept, left[part])
                calls = 1 + visited[:length].sum(-1)
                walks[label].append(Walk(number, text.task, answer, visited[length - 1], lengths, kept, calls))


# -- drafts


def make_drafters(named: Sequence[LabeledMethod], models: Models) -> list[ReplayedDrafter]:
    """Make one drafter for all methods that draft with the same.

    Raises:
        InputError: a draft that is longer than the head's.
    """
    lengths: dict[tuple[str, Any], dict[str, int]] = {}
    for item in named:
        if isinstance(item.method, PromptLookupMethod):
            lengths.setdefault(("", item.method.ngram), {})[item.label] = item.method.k
        elif isinstance(item.method, FixedLengthMethod):
            longest = item.method.policy(models.of(item.variant)).max_drafted
            lengths.setdefault((item.variant, item.method.drafter), {})[item.label] = longest
    drafters = []
    for (variant, drafter), own in lengths.items():
        chosen, depth, layers = models.of(variant), max(own.values()), tuple[int, ...]()
        chances: Chances = functools.partial(lookup_chances, depth, drafter)
        if drafter == MODEL:
            chances = functools.partial(model_chances, depth, chosen.embedder(MODEL))
        elif drafter in chosen.heads:
            net = chosen.net(drafter)
            chances = functools.partial(head_chances, depth, net, chosen.heads[drafter].config.max_position)
            layers = net.aux_layers
        drafters.append(ReplayedDrafter(chances, layers, own, isinstance(drafter, str)))
    return drafters


def lookup_chances(depth: int, ngram: int, seen: TargetText, starts: Ints, limits: Ints) -> tuple[Floats, Ints]:
    """Look drafts up. Nothing is drawn, so that a token is accepted where it is the text's, at any temperature."""
    ids, drafter, sampler = seen.text.ids, PromptLookupDrafter(depth, ngram), Sampler(seen.params, TorchSource(0))
    chances, lengths = np.zeros((1, len(starts), depth)), np.zeros_like(limits)
    for place, (start, limit) in enumerate(zip(starts.tolist(), limits.tolist(), strict=True)):
        if place == 0 or start != starts[place - 1] + 1:
            drafter.start(ids[: start - 1], torch.empty(0), ids[start - 1])
        draft = drafter.propose(limit, sampler).tokens
        lengths[place] = len(draft)
        there = ids[start : start + len(draft)]
        chances[0, place, : len(there)] = np.equal(draft[: len(there)], there)
        drafter.advance(Outcome((ids[start],), 0, torch.empty(0), torch.empty(0)))
    return chances, lengths


@torch.inference_mode()
def model_chances(depth: int, draft: CausalLM, seen: TargetText, starts: Ints, limits: Ints) -> tuple[Floats, Ints]:
    """Read the text with a draft model: behind accepted drafts, which are the text, it drafts as behind the text."""
    ids = torch.tensor(seen.text.ids, device=draft.device)
    hidden, chance = draft.features(ids[None])[0], np.zeros(len(ids) + depth)
    for piece in pieces(len(starts), max(1, LOGITS // draft.info.vocab_size)):
        at = torch.from_numpy(starts[piece]).to(draft.device)
        chance[starts[piece]] = accepted(draft.lm_head(hidden[at - 1]), ids[at], seen, at, MODEL)
    return chance[starts[:, None] + np.arange(depth)][None], limits


def head_chances(
    depth: int, net: DraftNet, longest: int, seen: TargetText, starts: Ints, limits: Ints
) -> tuple[Floats, Ints]:
    """Draft the text from each place, as the head drafts there. longest: text that it reads."""
    ids, opened = torch.tensor(seen.text.ids, device=net.device), min(len(seen.text.ids), longest)
    # Near the end of its context the head drafts fewer tokens; here it drafts none.
    limits = np.where((starts >= net.first_start) & (starts + depth <= longest), limits, 0)
    drafting = np.flatnonzero(limits)
    first = torch.from_numpy(starts[drafting]).to(net.device)
    # The slots of a block see each other: a longer one drafts otherwise.
    lengths = range(1, depth + 1) if isinstance(net, SlotNet) else [depth]
    chances = np.zeros((len(lengths), len(starts), depth))

    def draw(row: int, piece: slice, level: int, logits: Tensor) -> Tensor:
        at = (first[piece] + level).clamp_max(len(ids) - 1)
        chances[row, drafting[piece], level] = accepted(logits, ids[at], seen, at, net.name)
        return ids[at]

    for row, length in enumerate(lengths) if len(drafting) else ():
        branches = BranchDrafter(net, length)
        branches.open(seen.text.ids[:opened], seen.features(net.aux_layers, opened) if net.reads_features else None)
        branches.grow(first.tolist(), length, functools.partial(draw, row))
    return chances, limits


def accepted(logits: Tensor, tokens: Tensor, seen: TargetText, at: Tensor, name: str) -> Floats:
    """Return min(1, q / p) of the text's tokens [N] at these places [N], from a drafter's logits [N, V].

    Raises:
        NonFinite: the logits, of the drafter `name`.
    """
    if seen.params.greedy:
        chance = checked(best_tokens(logits), model=name) == tokens
    else:
        q = probabilities(logits, seen.params).gather(-1, tokens[:, None])[:, 0].double()
        checked(torch.where(q.isnan(), NO_TOKEN, 0), "probabilities", name)
        p = seen.prob[at.to(seen.prob.device)].to(q.device)
        # A token that the target never samples here was not sampled by it.
        chance = torch.where(p > 0, q / p, 0.0).clamp_max(1.0)
    return chance.double().cpu().numpy()


# -- numbers


def summarize(walks: Sequence[Walk], seed: int) -> dict[str, Any]:
    """Summarize one method over answers; names as of `results.summarize`, numbers of rounds are means.

    by_length: of shorter drafts of the same drafter.
    """
    rounds, resamples = rounds_of(walks), Resamples([walk.text for walk in walks], seed)
    tokens = np.array([walk.answer.end - walk.answer.begin for walk in walks])

    def numbers(calls: Floats) -> dict[str, Any]:
        taus = resamples.interval(resamples.sums(tokens) / resamples.sums(calls))
        return {"tau": float(tokens.sum() / calls.sum()), "tau_ci95": taus, "num_target_calls": float(calls.sum())}

    lengths = [numbers(calls) for calls in np.array([walk.calls for walk in walks]).T]
    drafted, kept = (float(rounds.weight @ own) for own in (rounds.drafted, rounds.accepted))
    return {
        "prompts": len(walks),
        "tokens": int(tokens.sum()),
        **lengths[-1],
        "num_draft_tokens": drafted,
        "num_accepted": kept,
        "acceptance_rate": kept / drafted if drafted else None,
        **acceptance(rounds, resamples),
        "by_length": [{"name": str(length), **own} for length, own in enumerate(lengths, 1)],
    }


def rounds_of(walks: Sequence[Walk]) -> Rounds:
    """Collect all places of answers, weighted by how often a round begins there."""
    places = [np.arange(walk.answer.begin + 1, walk.answer.end) for walk in walks]
    weight, drafted, reached = (
        np.concatenate([getattr(walk, name) for walk in walks]) for name in ("visits", "drafted", "reached")
    )
    left = np.concatenate([walk.answer.end - own for walk, own in zip(walks, places, strict=True)])
    kept = reached.sum(-1)
    turns = [walk.answer.turn for walk, own in zip(walks, places, strict=True) for _ in own]
    kinds = [kind for walk in walks for kind in walk.answer.kinds[1:]]
    answer = np.repeat(np.arange(len(walks)), list(map(len, places)))
    # Behind an accepted end token the target has no token of its own.
    emitted = kept + 1 - whole(reached, left)
    classes = classes_of(np.concatenate(places).tolist(), turns, kinds, CONTEXTS)
    return Rounds(answer, weight, drafted, kept, emitted, reached, classes)

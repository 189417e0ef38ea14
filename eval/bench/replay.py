"""`draftsmith eval bench --replay`: acceptance of drafters on recorded answers, without decoding (modules/along.py)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.data.console import progress_bar, tables_to_json
from draftsmith.data.engines.served_target import load_target
from draftsmith.data.settings import check_left_out
from draftsmith.data.store.manifest import MANIFEST, STARTED, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.text.answers import spans
from draftsmith.data.text.kinds import KINDS, PROMPT_TOKENS, Kind, kinds_of
from draftsmith.eval.bench.prompts import BenchPrompt, Row, chat_rows, check_labels, detect_language, with_labels
from draftsmith.eval.bench.results import NO_VALUE, OF_ROUNDS, Floats, Resamples, Rounds, classes_of_rounds
from draftsmith.eval.bench.runner import load_models
from draftsmith.eval.bench.slices import Sums, slices_of, verdict
from draftsmith.eval.bench.tables import replay_tables
from draftsmith.eval.meta import RESULTS, describe
from draftsmith.eval.settings import ROLES, BenchConfig
from draftsmith.modules.along import (
    AlongDrafter,
    Answer,
    TargetText,
    Walk,
    along_head,
    along_lookup,
    along_model,
    read,
    whole,
)
from draftsmith.modules.decoding.trace import tau
from draftsmith.modules.drafters import MODEL
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import LabeledMethod
from draftsmith.modules.drafters.methods import FixedLengthMethod
from draftsmith.modules.drafters.prompt_lookup import PromptLookupMethod
from draftsmith.modules.finite import name_nonfinite
from draftsmith.modules.llama_config import MOST_POSITIONS
from draftsmith.modules.pretrained.card import WEIGHTS, measured_chains, measured_of
from draftsmith.modules.pretrained.checkpoint import Checkpoint, checkpoint_of
from draftsmith.modules.pretrained.files import write_json
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams, check_ranges

MOST_FOREIGN = 0.05  # of an answer's tokens, that the target would not choose; other kernels change about 1 %
MOST_EXCESS = 0.1  # of the entropy, by which answers may surprise the target more, or less, than its own would
# Options of decoding, which nothing reads here.
OF_DECODING = (
    *("data", "tasks", "mid", "acceptance", "turns", "repeats", "traces", "card", "split"),
    *("max_new_tokens", "ignore_eos"),
)


@sole_writer()
def replay(config: BenchConfig, named: Sequence[LabeledMethod]) -> dict[str, Any]:
    """Measure, write the run's files, and return what results.json holds: meta, methods and tables.

    Raises:
        InputError: options of decoding, methods that are no chain of a fixed length, or answers that are not this
            target's.
    """
    check_left_out(config, OF_DECODING, "with --replay", "none: nothing is decoded")
    check_ranges(config, num_threads=1, limit=0)
    for item in named:
        if not isinstance(item.method, FixedLengthMethod | PromptLookupMethod):
            expected = "chains of a fixed length, such as spec:k=5 and eagle3:k=5, or pld"
            raise InputError("methods", f"{item.label} with --replay", expected, "Measure it with --data.")

    # Load.
    config, checkpoint = config.open(config.target)
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
    seen, walks = list[TargetText](), {item.label: list[Replayed]() for item in named}
    with progress_bar("replaying", len(texts), "texts") as progress:
        for number, text in enumerate(texts):
            with name_nonfinite([text.id]):
                seen.append(replay_text(target, number, text, params, drafters, walks))
            progress(1)

    # Summarize and write.
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
        answers=check_followed(seen),
    )
    meta["kind"] = "replay"
    methods = [
        {
            "method": label,
            "temperature": params.temperature,
            **summarize(own, config.seed, config.divisions, card_of(item, heads, params.temperature)),
        }
        for item, (label, own) in zip(named, walks.items(), strict=True)
    ]
    results = {"meta": meta, "methods": methods, "tables": tables_to_json(replay_tables(methods, meta))}
    write_json(config.output / RESULTS, results)
    return results


# -- recorded answers


@dataclass(frozen=True)
class RecordedAnswer(Answer):
    """An answer of a text. labels: its turn, its text's task and columns. kinds: of its tokens."""

    labels: dict[str, Any]
    kinds: Sequence[Kind]


@dataclass(frozen=True)
class RecordedText:
    """Text with answers of the target, each behind a prompt."""

    id: str
    ids: list[int]
    answers: list[RecordedAnswer]

    @classmethod
    def of(cls, row: Row, ends: Collection[int], text_of: Callable[[Sequence[int]], str], room: int) -> RecordedText:
        """Read a row with the fields of responses; its turn is that of the first answer. text_of: decodes tokens. room:
        most tokens of an answer."""
        ids, answers = row["input_ids"], []
        for turn, (begin, end) in enumerate(spans(row["loss_mask"]), row["turn"]):
            prompt = text_of(ids[max(0, begin - PROMPT_TOKENS) : begin])
            kinds = kinds_of([text_of([token]) for token in ids[begin:end]], prompt)
            limit = begin + room if ids[end - 1] in ends else end
            labels = {"turn": turn, "task": row["task"] or "", **row["labels"]}
            answers += [RecordedAnswer(begin, end, limit, labels, kinds)] if begin else []
        return cls(row["id"], ids, answers)


def read_recorded(config: BenchConfig, target: Checkpoint) -> tuple[list[RecordedText], SamplingParams]:
    """Read the first `limit` texts (0: all) of `config.replay`, and how their answers were sampled.

    Raises:
        InputError: no such source, another tokenizer, a text without an answer behind a prompt, or options of sampling
            where the answers record it.
    """
    path, params, columns = Path(resolve_model(str(config.replay))), config.modes[0], config.columns
    room = MOST_POSITIONS  # of chats it is not known
    ends = target.end_tokens
    rows: Iterable[Row]
    if (path / MANIFEST).exists() or (path / STARTED).exists():
        manifest = open_artifact(path, ("responses", "prompts"), target.text_identity())
        if "loss_mask" not in manifest.field_names:
            raise InputError("replay", "prompts without answers", "responses", "Make them: data responses.")
        if manifest.kind == "responses":
            named = ("temperature", "top_k", "top_p")
            check_left_out(config, named, "with --replay", "none: responses record how they were sampled")
            params, ends = SamplingParams(**(manifest.sampling or {})), () if manifest.config["ignore_eos"] else ends
            room = manifest.config["max_new_tokens"]
        stored = Rows(manifest, None, config.limit, target.shape.vocab_size).iterate()
        rows = with_labels(stored, path, columns)
    else:
        rows = itertools.islice(chat_rows(str(path), target, "last", columns, supervised=True), config.limit or None)
    texts = [RecordedText.of(row, ends, target.tokenizer.decode, room) for row in rows]
    if empty := next((text.id for text in texts if not text.answers), None):
        raise InputError("replay", f"text {empty} without an answer behind a prompt", "one in each", "Leave it out.")
    labels = [answer.labels for text in texts for answer in text.answers]
    check_labels(labels, columns)
    decode, cuts = target.tokenizer.decode, [(text.ids, own.begin, own.end) for text in texts for own in text.answers]
    detect_language(labels, ((decode(ids[a:b]), decode(ids[max(0, a - PROMPT_TOKENS) : a])) for ids, a, b in cuts))
    return texts, params


def check_followed(read: Sequence[TargetText]) -> dict[str, Any]:
    """Check that answers are the target's own, as far as their tokens tell. Return what was measured.

    Raises:
        InputError: too many tokens that the target would not choose; or sampled ones that surprise it more, or less,
            than its own would: they have another temperature, or come from another model.
    """
    names, params = ("foreign", "surprise", "entropy"), read[0].params
    foreign, surprise, entropy = (torch.cat([getattr(text, name) for text in read]) for name in names)
    about, remedy = {"foreign": float(foreign.double().mean())}, "Pass the target that answered, and its sampling."
    if about["foreign"] > MOST_FOREIGN:
        found = f"{about['foreign']:.0%} of the answers' tokens that {read[0].params} does not choose here"
        raise InputError("replay", found, f"at most {MOST_FOREIGN:.0%}", remedy)
    if not params.greedy:
        excess = (surprise - entropy)[~foreign]
        about |= {"entropy": float(entropy.mean()), "excess": float(excess.mean())}
        if abs(about["excess"]) > max(5 * float(excess.std()) / len(excess) ** 0.5, MOST_EXCESS * about["entropy"]):
            found = f"answers that surprise the target by {about['entropy'] + about['excess']:.3f} nats a token"
            raise InputError("replay", found, f"{about['entropy']:.3f}, as its own at {params}", remedy)
    return about


# -- drafts along them


@dataclass(frozen=True)
class Replayed:
    """Walk of one method over an answer of the text of this number."""

    text: int
    answer: RecordedAnswer
    walk: Walk


Drafters = Sequence[tuple[AlongDrafter, Mapping[str, int]]]  # with the lengths of drafts by the methods' labels


def make_drafters(named: Sequence[LabeledMethod], models: Models) -> Drafters:
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
        chosen, depth = models.of(variant), max(own.values())
        if drafter == MODEL:
            along = along_model(depth, chosen.embedder(MODEL), MODEL)
        elif drafter in chosen.heads:
            along = along_head(depth, chosen.net(drafter), chosen.heads[drafter].config.max_position)
        else:
            along = along_lookup(depth, drafter)
        drafters.append((along, own))
    return drafters


def replay_text(
    target: CausalLM,
    number: int,
    text: RecordedText,
    params: SamplingParams,
    drafters: Drafters,
    walks: Mapping[str, list[Replayed]],
) -> TargetText:
    """Append the walks over a text's answers to those of each method; return the text without its states."""
    seen = read(target, text.ids, text.answers, params, [layer for along, _ in drafters for layer in along.layers])
    for along, lengths in drafters:
        for answer, own in zip(text.answers, along.walk(seen, [*lengths.values()]), strict=True):
            for label, walk in zip(lengths, own, strict=True):
                walks[label].append(Replayed(number, answer, walk))
    # The states are large, and nothing reads them again.
    return dataclasses.replace(seen, states={})


# -- numbers


def card_of(item: LabeledMethod, heads: Mapping[str, str], temperature: float) -> Row | None:
    """Return what the card of a method's head has of the same drafts at this temperature; None if nothing."""
    path = next((heads[key] for key in item.keys(heads) if key in heads), None)
    if path is None or not isinstance(item.method, FixedLengthMethod):
        return None
    return measured_chains(measured_of(path), item.method.drafter, temperature).get(item.method.length)


def summarize(replayed: Sequence[Replayed], seed: int, by: Sequence[str], card: Row | None = None) -> dict[str, Any]:
    """Summarize one method over answers; names as of `results.summarize`, numbers of rounds are means.

    `by` also has each `draft_length` of the same drafter. `slices` and `verdict` compare the classes (slices.py).

    card: what the head's card has of this method.
    """
    numbers = summary_row(replayed, seed)
    resamples, calls = resamples_of(replayed, seed), torch.stack([one.walk.calls for one in replayed]).T.numpy()
    rounds, tokens = rounds_of(replayed), np.array([one.walk.num_tokens for one in replayed], np.float64)
    classes, divided = classes_of_rounds(rounds, resamples, by), dict[str, dict[str, Sums]]()
    for name in classes:
        divided[name] = {about["name"]: rounds.sums(mask, len(replayed)) for about, mask in rounds.classes(name)}
    for name in (name for name in by if name not in OF_ROUNDS):
        labels = np.array([one.answer.labels[name] or NO_VALUE for one in replayed])
        if (labels != NO_VALUE).any():
            masks = {str(value): labels == value for value in np.unique(labels)}
            parts = {value: [*itertools.compress(replayed, mask)] for value, mask in masks.items()}
            classes[name] = [{"name": value, **summary_row(own, seed)} for value, own in parts.items()]
            divided[name] = {value: (tokens * mask, calls[-1] * mask) for value, mask in masks.items()}
    lengths = [{"name": str(n), **tau_of(replayed, resamples, own)} for n, own in enumerate(calls, 1)]
    numbers["by"] = {"draft_length": lengths, **{name: classes[name] for name in by if classes.get(name)}}
    slices = slices_of(divided, resamples, card)
    return numbers | {"slices": slices, "verdict": verdict(slices, divided, (tokens, calls[-1]), resamples, card)}


def summary_row(replayed: Sequence[Replayed], seed: int) -> dict[str, Any]:
    """Summarize one method over some answers."""
    rounds, calls = rounds_of(replayed), np.array([float(one.walk.calls[-1]) for one in replayed])
    drafted, kept = (float(rounds.weight @ own) for own in (rounds.drafted, rounds.accepted))
    return {
        "prompts": len(replayed),
        "tokens": sum(one.walk.num_tokens for one in replayed),
        **tau_of(replayed, resamples_of(replayed, seed), calls),
        "num_draft_tokens": drafted,
        "num_accepted": kept,
        "acceptance_rate": kept / drafted if drafted else None,
        "accepted_by_place": rounds.by_place(),
    }


def resamples_of(replayed: Sequence[Replayed], seed: int) -> Resamples:
    return Resamples([one.text for one in replayed], seed)


def tau_of(replayed: Sequence[Replayed], resamples: Resamples, calls: Floats) -> dict[str, Any]:
    """Return tau, its interval, and the sum of the target calls [N] of the answers."""
    tokens = np.array([one.walk.num_tokens for one in replayed])
    taus = resamples.interval(resamples.sums(tokens) / resamples.sums(calls))
    return {
        "tau": tau(float(tokens.sum()), float(calls.sum())),
        "tau_ci95": taus,
        "num_target_calls": float(calls.sum()),
    }


def rounds_of(replayed: Sequence[Replayed]) -> Rounds:
    """Collect all places of answers, weighted by how often a round begins there."""
    places = [one.answer.starts for one in replayed]
    weight, drafted, reached = (
        torch.cat([getattr(one.walk, name) for one in replayed]) for name in ("visits", "drafted", "reached")
    )
    left = torch.cat([one.answer.end - own for one, own in zip(replayed, places, strict=True)])
    kept = reached.sum(-1)
    # Behind an accepted end token the target has no token of its own.
    emitted = kept + 1 - whole(reached, left)
    answer = np.repeat(np.arange(len(replayed)), list(map(len, places)))
    turns = np.array([one.answer.labels["turn"] for one in replayed])[answer]
    kinds = np.array([KINDS.index(kind) for one in replayed for kind in one.answer.kinds[1:]])
    context, accepted = torch.cat(places).numpy(), kept.numpy()
    counts = {"weight": weight, "drafted": drafted.sum(-1), "emitted": emitted, "long": drafted, "reached": reached}
    arrays = {name: own.numpy() for name, own in counts.items()}
    return Rounds(answer, **arrays, accepted=accepted, context=context, turn=turns, kind=kinds)

"""Recorded answers of a target, for `eval bench --replay`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.settings import check_left_out
from draftsmith.data.store.manifest import MANIFEST, STARTED, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.answers import spans
from draftsmith.eval.bench.kinds import PROMPT_TOKENS, Kind, kinds_of
from draftsmith.eval.bench.prompts import Row, chat_rows, check_labels, with_labels
from draftsmith.eval.settings import BenchConfig
from draftsmith.modules.along import Answer, TargetText
from draftsmith.modules.llama_config import MOST_POSITIONS
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.types import InputError, SamplingParams

MOST_FOREIGN = 0.05  # of an answer's tokens, that the target would not choose; other kernels change about 1 %
MOST_EXCESS = 0.1  # of the entropy, by which answers may surprise the target more, or less, than its own would


@dataclass(frozen=True)
class RecordedAnswer(Answer):
    """An answer of a text. labels: its turn, its text's task and columns. kinds: of its tokens."""

    labels: Mapping[str, Any]
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
        stored = Rows(manifest.directory, manifest, None, config.limit, target.shape.vocab_size).iterate()
        rows = with_labels(stored, path, columns)
    else:
        rows = itertools.islice(chat_rows(str(path), target, "last", columns, supervised=True), config.limit or None)
    texts = [RecordedText.of(row, ends, target.tokenizer.decode, room) for row in rows]
    if empty := next((text.id for text in texts if not text.answers), None):
        raise InputError("replay", f"text {empty} without an answer behind a prompt", "one in each", "Leave it out.")
    check_labels([answer.labels for text in texts for answer in text.answers], columns)
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

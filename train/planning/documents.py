"""The documents of a training that is planned: from an artefact's index, or assumed where there is none yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from draftsmith.data.store.datasets import in_pieces
from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.data.store.shards import Rows
from draftsmith.data.text.answers import conversation_numbers
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import held_out
from draftsmith.train.planning.step import Subject

# Of the tokens of documents that are not there yet.
ASSUMED_LOSS_SHARE = 0.6


@dataclass(frozen=True)
class TrainingDocuments:
    """The training samples: tokens of each, the share of tokens that the loss counts, and where that is from.

    kind: of the artefact: features, responses, prompts, acceptance, rollouts. The length of one of the
        last is that of its text and of its drafts.
    """

    lengths: Sequence[int]
    loss_share: float
    source: str
    kind: str
    assumed: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class _Texts:
    """A data set of which only the lengths are known."""

    manifest = None

    def __init__(self, lengths: list[int]):
        self.lengths = lengths


def training_documents(config: TrainConfig, subject: Subject, samples: int, length: int) -> TrainingDocuments:
    """The training samples of the artefact, split at the context where they are longer, and without held-out ones.

    samples, length: what is assumed where there is no artefact.
    """
    directory, assumed = config.data, not (config.data / MANIFEST).exists()
    if assumed:
        lengths, share, kind = [length] * samples, ASSUMED_LOSS_SHARE, subject.kind
        own = list(range(samples))
        said = f"assumed: {samples:,} samples of {length} tokens, as {directory} is not there"
    else:
        manifest = Manifest.read(directory)
        lengths, share, kind, said = *_texts(directory, manifest), manifest.kind, str(directory)
        own = _conversations(directory, manifest, len(lengths))
    pieces = in_pieces(_Texts(lengths), min(config.max_length or subject.context, subject.context), subject.lookahead)
    rows = [own[row] for row in getattr(pieces, "rows", range(len(lengths)))]
    lengths = pieces.lengths
    if config.val is None:
        train, _ = held_out(len(set(rows)), config.val_share)
        kept = set(train)
        lengths = [length for length, row in zip(lengths, rows, strict=True) if row in kept]
    return TrainingDocuments(lengths, share, said, kind, assumed)


def has_texts(directory: Path) -> bool:
    """True for a complete artefact whose rows have tokens and answers: what a training reads."""
    return (directory / MANIFEST).exists() and "input_ids" in {field.name for field in Manifest.read(directory).fields}


def _conversations(directory: Path, manifest: Manifest, count: int) -> list[int]:
    """Which conversation each row is of: those of one are on one side of training and validation."""
    if "turn" not in {spec.name for spec in manifest.fields}:
        return list(range(count))
    return conversation_numbers(Rows(directory, manifest, ["turn"]).table()["turn"].to_numpy())


def _texts(directory: Path, manifest: Manifest) -> tuple[list[int], float]:
    """Tokens of every row of an artefact, and the share of all tokens that a loss counts."""
    columns = {"features": ["length"], "rollouts": ["input_ids", "draft_ids"]}.get(manifest.kind, ["input_ids"])
    table = Rows(directory, manifest, columns).table()
    parts = [table[name] if name == "length" else pc.list_value_length(table[name]) for name in columns]
    lengths = [sum(sizes) for sizes in zip(*(part.to_pylist() for part in parts), strict=True)]
    counts = manifest.counts
    named = (name for name in ("loss_tokens", "response_tokens", "drafted_tokens") if name in counts)
    counted = counts.get(next(named, ""), sum(lengths))
    return lengths, counted / max(1, sum(lengths))

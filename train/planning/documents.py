"""The documents of a training that is planned: from an artefact's index, or assumed where there is none yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pyarrow.compute as pc

from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.data.store.shards import Rows
from draftsmith.data.text.answers import conversation_numbers
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import train_and_val
from draftsmith.train.planning.subjects import PlannedTraining

# Of the tokens of documents that are not there yet.
ASSUMED_LOSS_SHARE = 0.6


@dataclass(frozen=True)
class TrainingDocuments:
    """The training samples: tokens of each (of one with drafts, theirs too), the share of tokens that the loss counts,
    and where that is from."""

    lengths: Sequence[int]
    loss_share: float
    source: str

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class _Texts:
    """A data set of which only lengths and conversations are known."""

    manifest = None

    def __init__(self, lengths: list[int], conversations: list[int]):
        self.lengths, self.answers = lengths, SimpleNamespace(conversations=conversations)

    def __len__(self) -> int:
        return len(self.lengths)


def training_documents(config: TrainConfig, training: PlannedTraining, samples: int, length: int) -> TrainingDocuments:
    """The training samples of the artefact, split at the context where they are longer, and without held-out ones.

    samples, length: what is assumed where there is no artefact.
    """
    directory = config.data
    if (directory / MANIFEST).exists():
        texts, share = _read(directory)
        said = str(directory)
    else:
        texts, share = _Texts([length] * samples, list(range(samples))), ASSUMED_LOSS_SHARE
        said = f"assumed: {samples:,} samples of {length} tokens, as {directory} is not there"
    val = None if config.val is None else texts
    train, _ = train_and_val(config, texts, val, training.context, training.lookahead, told=False)
    return TrainingDocuments(train.lengths, share, said)


def has_texts(directory: Path) -> bool:
    """True for a complete artefact whose rows have tokens and answers: what a training reads."""
    return (directory / MANIFEST).exists() and "input_ids" in {field.name for field in Manifest.read(directory).fields}


def _read(directory: Path) -> tuple[_Texts, float]:
    """The rows of an artefact, and the share of all tokens that a loss counts."""
    manifest = Manifest.read(directory)
    columns = {"features": ["length"], "rollouts": ["input_ids", "draft_ids"]}.get(manifest.kind, ["input_ids"])
    turns = ["turn"] if "turn" in {spec.name for spec in manifest.fields} else []
    table = Rows(directory, manifest, [*columns, *turns]).table()
    parts = [table[name] if name == "length" else pc.list_value_length(table[name]) for name in columns]
    lengths = [sum(sizes) for sizes in zip(*(part.to_pylist() for part in parts), strict=True)]
    own = conversation_numbers(table["turn"].to_numpy()) if turns else list(range(len(lengths)))
    counts = manifest.counts
    named = (name for name in ("loss_tokens", "response_tokens", "drafted_tokens") if name in counts)
    counted = counts.get(next(named, ""), sum(lengths))
    return _Texts(lengths, own), counted / max(1, sum(lengths))

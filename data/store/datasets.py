"""Artefacts as torch data sets: one row a sample, and the collate functions that pad them to the right.

What a sample is depends on (seed, epoch, row) and nothing else: not on the order of reading, nor on who reads it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils.data import Dataset

from draftsmith.data.engines.own import row_uniforms
from draftsmith.data.features import key, open_texts
from draftsmith.data.models.loading import vocabulary_size
from draftsmith.data.store.columns import open_columns
from draftsmith.data.store.feature_codec import FeatureFiles, as_item, decoded
from draftsmith.data.store.manifest import Manifest, open_artefact
from draftsmith.data.text.answers import answer_lengths, conversation_numbers
from draftsmith.modules.types import FeatureBatch, InputError

Item = dict[str, Tensor]
ROWS_TOGETHER = 4096  # whose masks are made at a time


@dataclass(frozen=True)
class AcceptanceTokens:
    """A batch of labelled text, before the draft has read it. Position t of a row holds z_t.

    Where loss_mask is true, z_t is a drafted token y_t and accept_prob, log_q and overlap are its labels; elsewhere
    they are 0.
    """

    z_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool
    accept_prob: Tensor  # [B, T] float32
    log_q: Tensor  # [B, T] float32
    overlap: Tensor  # [B, T] float32
    attention_mask: Tensor  # [B, T] bool, false on padding


class Lists:
    """A list column, chunk by chunk: a row is a slice of what Arrow holds or maps, not Python numbers. As one chunk,
    Arrow's lists would end at 2^31 tokens."""

    def __init__(self, column: pa.ChunkedArray):
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._values, self._offsets = [chunk.values for chunk in chunks], [chunk.offsets for chunk in chunks]
        self._ends = list(itertools.accumulate(map(len, chunks)))

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64."""
        parts = [np.diff(offsets.to_numpy()) for offsets in self._offsets]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def __getitem__(self, row: int) -> np.ndarray:
        chunk = bisect.bisect_right(self._ends, row)
        offsets = self._offsets[chunk]
        at = row - (self._ends[chunk] - len(offsets) + 1)
        begin, end = offsets[at].as_py(), offsets[at + 1].as_py()
        return self._values[chunk].slice(begin, end - begin).to_numpy(zero_copy_only=False)

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows in order, a chunk at a time: their values one behind the other, and where each begins and the last
        one ends."""
        for values, places in zip(self._values, self._offsets, strict=True):
            offsets = places.to_numpy()
            own = values.slice(offsets[0], offsets[-1] - offsets[0])
            yield own.to_numpy(zero_copy_only=False), offsets - offsets[0]


class BehindPrompts:
    """Masks of one answer a row, as `Lists` gives those that are stored: all that is behind the prompt."""

    def __init__(self, prompts: np.ndarray, lengths: np.ndarray):
        """prompts: their tokens in each row of so many tokens, [N] both."""
        self._prompts, self._lengths = prompts, lengths

    def __getitem__(self, row: int) -> np.ndarray:
        return np.arange(self._lengths[row]) >= self._prompts[row]

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As of `Lists`, some rows at a time."""
        for start in range(0, len(self._lengths), ROWS_TOGETHER):
            lengths, prompts = (own[start : start + ROWS_TOGETHER] for own in (self._lengths, self._prompts))
            offsets = np.concatenate([[0], lengths]).cumsum()
            yield np.arange(offsets[-1]) >= (offsets[:-1] + prompts).repeat(lengths), offsets


class ArtefactDataset(Dataset):
    """Rows of an artefact as samples.

    manifest: its own. answers: the masks [T] of each row's answers. conversations: which one each row is of, counted
    from 0, [N]. lengths: tokens of each row, [N] int64.
    """

    answers: Lists | BehindPrompts

    def __init__(self, directory: Path, manifest: Manifest, columns: Sequence[str] = (), vocab_size: int | None = None):
        """columns: to read beside ids, tokens and answers. vocab_size: of the model that reads them, if it is known."""
        names = {spec.name for spec in manifest.fields}
        # Artefacts of earlier versions have one answer a row, behind its prompt, and one row a conversation.
        answers = "loss_mask" if "loss_mask" in names else "prompt_length"
        wanted = ["id", "input_ids", answers, *({"turn"} & names), *columns]
        self.manifest, self._opened = manifest, (Path(directory), wanted, vocab_size)
        self._open()
        self.lengths = self._lists["input_ids"].lengths
        turns = self._table["turn"].to_numpy() if "turn" in names else np.ones(len(self.lengths), dtype=np.int64)
        self.conversations = conversation_numbers(turns)

    def _open(self) -> None:
        directory, wanted, vocab_size = self._opened
        table = open_columns(directory, self.manifest, wanted, vocab_size)
        self._table = table
        lists = {name: Lists(table[name]) for name in wanted if pa.types.is_list(table[name].type)}
        self.answers = lists.pop("loss_mask", None) or BehindPrompts(
            table["prompt_length"].to_numpy(), lists["input_ids"].lengths
        )
        self._lists = lists

    def __getstate__(self) -> dict[str, Any]:
        """State for a reader process: it opens the columns itself."""
        return {name: value for name, value in vars(self).items() if name not in ("_table", "_lists", "answers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, row: int) -> Item:
        """The row as it is in epoch 0."""
        return self.item(row, 0)

    def item(self, row: int, epoch: int) -> Item:
        """The row as it is in an epoch: of a text input_ids [T] int64 and loss_mask [T] bool, of FeatureBatch."""
        ids = torch.from_numpy(self._lists["input_ids"][row].astype(np.int64))
        return {"input_ids": ids, "loss_mask": torch.from_numpy(self.answers[row].astype(bool))}

    def name(self, row: int) -> str:
        """The row's id."""
        return self._table["id"][int(row)].as_py()

    def answer_lengths(self, rows: Sequence[int]) -> np.ndarray:
        """Tokens of every answer of these rows."""
        chosen, start, found = np.zeros(len(self), dtype=bool), 0, [np.zeros(0, dtype=np.int64)]
        chosen[np.asarray(rows, dtype=np.int64)] = True
        for values, offsets in self.answers.parts():
            lengths, owner = answer_lengths(values, offsets)
            found.append(lengths[chosen[start + owner]])
            start += len(offsets) - 1
        return np.concatenate(found)

    def token_counts(self, rows: Sequence[int], vocab_size: int) -> Tensor:
        """How often [vocab_size] each token occurs in the answers of these rows."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for row in rows:
            answered = self._lists["input_ids"][row][self.answers[row].astype(bool)]
            counts += np.bincount(answered, minlength=vocab_size)
        return torch.from_numpy(counts)

    def to_datasets(self) -> Any:
        """The columns of its Parquet files as a `datasets.Dataset`. Hidden states of features lie beside them in
        safetensors, and are not among these."""
        return as_datasets(self._opened[0], self.manifest)


def as_datasets(directory: Path, manifest: Manifest) -> Any:
    """An artefact's columns as a `datasets.Dataset`: mapped, not read."""
    import datasets

    shard = next(entry.name for entry in manifest.files if entry.name.endswith(".parquet"))
    table = open_columns(directory, manifest, pq.read_schema(directory / shard).names)
    return datasets.Dataset(datasets.table.InMemoryTable(table))


class AcceptanceDataset(ArtefactDataset):
    """Rows of an `acceptance` artefact with tokens mixed anew in every epoch (SpecDec++, section 3.3).

    z_t is the target's token x_t with probability `mix`, else the drafted y_t; the loss counts the latter only.
    """

    def __init__(
        self,
        directory: Path,
        mix: float = 0.15,
        seed: int = 0,
        identity: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
    ):
        if not 0 <= mix < 1:
            raise InputError("mix", mix, "a probability in [0, 1)", "The paper's is 0.15.")
        manifest = open_artefact(directory, "acceptance", identity)
        super().__init__(directory, manifest, ["draft_ids", "accept_prob", "log_q", "overlap"], vocab_size)
        self.mix, self.seed = mix, seed

    def item(self, row: int, epoch: int) -> Item:
        """z_ids [T] int64, loss_mask [T] bool, accept_prob, log_q and overlap [T] float32."""
        ids = self._lists["input_ids"][row].astype(np.int64)
        places = np.flatnonzero(self.answers[row])  # the labels are of these, in order
        own = row_uniforms(f"mix/{self.seed}", epoch, row, len(places)) >= self.mix
        drafted = np.zeros(len(ids), dtype=bool)
        drafted[places] = own
        ids[drafted] = self._lists["draft_ids"][row][own]
        item = {"z_ids": torch.from_numpy(ids), "loss_mask": torch.from_numpy(drafted)}
        for name in ("accept_prob", "log_q", "overlap"):
            values = np.zeros(len(ids), dtype=np.float32)
            values[drafted] = self._lists[name][row][own]
            item[name] = torch.from_numpy(values)
        return item


class FeatureDataset(ArtefactDataset):
    """Rows of a `features` artefact; the safetensors files stay open, and only what is asked for is read.

    check: `sha256` reads the whole artefact once at the start to see that it is intact; `size` does not.
    """

    def __init__(
        self,
        directory: Path,
        identity: Mapping[str, Any] | None = None,
        check: str = "sha256",
        vocab_size: int | None = None,
    ):
        manifest = open_artefact(directory, "features", identity, check)
        super().__init__(directory, manifest, ["row", "shard"], vocab_size)
        remedy = f"Delete it and run the stage again, which rebuilds just this shard: {manifest.command}"
        self._files = FeatureFiles(directory, remedy)

    def item(self, row: int, epoch: int) -> Item:
        """The text's fields, and features [T, L*H]: bf16, or fp8 with scale [T], as they are stored."""
        shard, number = (self._table[name][int(row)].as_py() for name in ("shard", "row"))
        item = super().item(row, epoch) | as_item(self._files.read(shard, key(number), f"row {self.name(row)}"))
        if len(item["features"]) != len(item["input_ids"]):
            found = f"{len(item['features'])} states in row {row} ({self.name(row)})"
            remedy = f"Make it again with another output: {self.manifest.command}"
            raise InputError(f"{self._opened[0]}, features", found, f"{len(item['input_ids'])}, one a token", remedy)
        return item

    def __getitem__(self, row: int) -> Item:
        """The row as it is in epoch 0, its features in bf16."""
        item = self.item(row, 0)
        return {**item, "features": decoded(item["features"], item.pop("scale", None))}


class ResponsesDataset(ArtefactDataset):
    """Rows of a `responses` artefact, or of supervised prompts: those of the `features` artefact that would be made of
    it, without the features."""

    def __init__(self, directory: Path, target: str, identity: Mapping[str, str]):
        """identity: the target's; responses must be its own, and supervised prompts of its tokenizer."""
        super().__init__(directory, open_texts(directory, target, identity, "data"), (), vocabulary_size(target))


class Pieces(Dataset):
    """A data set whose long samples are cut into pieces of at most `max_length` tokens, each a sample of its own.

    overlap: tokens that the next piece repeats, for heads that need some before the first one that counts. rows: the
    sample that each piece is of. lengths: tokens of each piece.
    """

    def __init__(self, dataset: Any, max_length: int, overlap: int):
        assert 0 <= overlap < max_length
        self.dataset, self.manifest = dataset, dataset.manifest
        lengths, stride = np.asarray(dataset.lengths, dtype=np.int64), max_length - overlap
        counts = -(-np.maximum(1, lengths - overlap) // stride)
        self.rows = np.arange(len(lengths)).repeat(counts)
        self._starts = (np.arange(len(self.rows)) - (counts.cumsum() - counts).repeat(counts)) * stride
        self.lengths = np.minimum(max_length, lengths[self.rows] - self._starts)

    @property
    def conversations(self) -> np.ndarray:
        """Which conversation each piece is of, as a number."""
        return np.asarray(self.dataset.conversations)[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def token_counts(self, pieces: Sequence[int], vocab_size: int) -> Tensor:
        """As of the samples that the pieces are of."""
        return self.dataset.token_counts(np.unique(self.rows[np.asarray(pieces, dtype=np.int64)]), vocab_size)

    def item(self, index: int, epoch: int) -> Item:
        """The fields of the sample's item, cut."""
        start, item = int(self._starts[index]), self.dataset.item(int(self.rows[index]), epoch)
        return {name: value[start : start + self.lengths[index]] for name, value in item.items()}

    def name(self, index: int) -> str:
        """The name of the sample it is a piece of."""
        return self.dataset.name(int(self.rows[index]))

    def answer_lengths(self, indices: Sequence[int]) -> np.ndarray:
        """Tokens of every answer of the rows that these pieces are of, of each row once."""
        return self.dataset.answer_lengths(np.unique(self.rows[np.asarray(indices, dtype=np.int64)]))


def in_pieces(dataset: Any, max_length: int, overlap: int = 0) -> Any:
    """The data set with no sample longer than `max_length`, which is the data set itself where none is."""
    return Pieces(dataset, max_length, overlap) if np.max(dataset.lengths, initial=0) > max_length else dataset


def collate_acceptance(items: Sequence[Item]) -> AcceptanceTokens:
    """Rows padded at the right with zeros, false in both masks."""
    return AcceptanceTokens(**_padded(items), attention_mask=_attention_mask(items, "z_ids"))


def collate_features(items: Sequence[Item]) -> FeatureBatch:
    """Rows padded at the right with zeros, false in both masks. No features unless all rows have them: who computes
    some for this batch computes all."""
    attended = _attention_mask(items, "input_ids")
    positions = torch.arange(attended.shape[1]) * attended
    fields: dict[str, Any] = {"features": None, "position_ids": positions, **_padded(items)}
    return FeatureBatch(**fields, attention_mask=attended)


def pack_features(items: Sequence[Item]) -> FeatureBatch:
    """Rows laid end to end, [1, N]: no padding (modules/packing.py). Features as `collate_features` has them."""
    lengths = tuple(len(item["input_ids"]) for item in items)
    flat = {name: torch.cat([item[name] for item in items])[None] for name in _common(items)}
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    fields: dict[str, Any] = {"features": None, "position_ids": positions, **flat}
    return FeatureBatch(**fields, attention_mask=torch.ones_like(flat["loss_mask"]), lengths=lengths)


def _padded(items: Sequence[Item]) -> dict[str, Tensor]:
    def pad(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([item[name] for item in items], batch_first=True)

    return {name: pad(name) for name in _common(items)}


def _common(items: Sequence[Item]) -> list[str]:
    return [name for name in items[0] if all(name in item for item in items)]


def _attention_mask(items: Sequence[Item], name: str) -> Tensor:
    lengths = torch.tensor([len(item[name]) for item in items])
    return torch.arange(int(lengths.max()))[None] < lengths[:, None]

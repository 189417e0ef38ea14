"""Artefacts as torch data sets: one row a sample, and the collate functions that pad them to the right.

What a sample is depends on (seed, epoch, row) and nothing else: not on the order of reading, nor on who reads it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset

from draftsmith.data.features import key, open_texts
from draftsmith.data.store import feature_codec
from draftsmith.data.store.manifest import Manifest, open_artefact
from draftsmith.data.store.shards import Rows
from draftsmith.data.text.answers import answer_lengths, conversation_numbers
from draftsmith.modules.finite import first_broken
from draftsmith.modules.types import FeatureBatch, InputError

Item = dict[str, Tensor]


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


class ArtefactDataset(Dataset):
    """Rows of an artefact as samples. manifest: its own. answers: where they are in each row."""

    manifest: Manifest
    answers: AnswerSpans

    def _read_table(self, directory: Path, manifest: Manifest, columns: Sequence[str]) -> pa.Table:
        """These columns, and those that say where the answers are."""
        table = Rows(directory, manifest, [*columns, *answer_columns(manifest)]).table()
        self.manifest, self.answers = manifest, AnswerSpans(table)
        self._names = Rows(directory, manifest, ["id"])
        return table

    def __len__(self) -> int:
        return len(self.answers)

    def name(self, row: int) -> str:
        """The row's id."""
        return self._names.read(row, row + 1)[0]["id"]


class AcceptanceDataset(ArtefactDataset):
    """Rows of an `acceptance` artefact with tokens mixed anew in every epoch (SpecDec++, section 3.3).

    z_t is the target's token x_t with probability `mix`, else the drafted y_t; the loss counts the latter only.
    """

    def __init__(self, directory: Path, mix: float = 0.15, seed: int = 0, identity: Mapping[str, Any] | None = None):
        if not 0 <= mix < 1:
            raise InputError("mix", mix, "a probability in [0, 1)", "The paper's is 0.15.")
        columns = ["input_ids", "draft_ids", "accept_prob", "log_q", "overlap"]
        table = self._read_table(directory, open_artefact(directory, "acceptance", identity), columns)
        self.mix, self.seed = mix, seed
        self._lists = {name: Lists(table[name]) for name in columns}
        check_finite_labels(directory, self._names, self._lists["accept_prob"])
        # Shared memory, so that reader processes that live on into the next epoch see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self._lists["input_ids"].lengths.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Redraw which tokens are mixed in."""
        self._epoch.fill_(epoch)

    def __getitem__(self, row: int) -> Item:
        """The row in the epoch that `set_epoch` has set."""
        return self.item(row, int(self._epoch))

    def item(self, row: int, epoch: int) -> Item:
        """z_ids [T] int64, loss_mask [T] bool, accept_prob, log_q and overlap [T] float32."""
        ids = self._lists["input_ids"][row].astype(np.int64)
        places = np.flatnonzero(self.answers.mask(row))  # the labels are of these, in order
        own = _generator("mix", self.seed, epoch, row).random(len(places)) >= self.mix
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

    def __init__(self, directory: Path, identity: Mapping[str, Any] | None = None, check: str = "sha256"):
        manifest = open_artefact(directory, "features", identity, check)
        table = self._read_table(directory, manifest, ["row", "shard", "input_ids"])
        self._directory = Path(directory)
        self._rows, self._shards = table["row"].to_numpy(), table["shard"].to_pylist()
        self._ids = Lists(table["input_ids"])
        self._files: dict[tuple[int, str], Any] = {}

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self._ids.lengths.tolist()

    def __getitem__(self, row: int) -> Item:
        """Fields of FeatureBatch for one row: input_ids [T], features [T, H] bf16, loss_mask [T], position_ids [T]."""
        ids = torch.from_numpy(self._ids[row].astype(np.int64))
        features = feature_codec.stored_features(self._open(self._shards[row]), key(int(self._rows[row])))
        place = first_broken(features)
        if place is not None:
            raise broken_features(self._directory / self._shards[row], f"row {self.name(row)}", place)
        return {
            "input_ids": ids,
            "features": features,
            "loss_mask": torch.from_numpy(self.answers.mask(row)),
            "position_ids": torch.arange(len(ids)),
        }

    def _open(self, name: str) -> Any:
        """The file, opened once in each process: a forked reader must not share its parent's."""
        place = (os.getpid(), name)
        if place not in self._files:
            path = self._directory / name
            try:
                self._files[place] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                remedy = f"Delete it and run the stage again, which rebuilds just this shard: {self.manifest.command}"
                raise InputError(str(path), f"unreadable ({error})", "a safetensors shard", remedy) from error
        return self._files[place]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # open files do not travel to a spawned reader


class ResponsesDataset(ArtefactDataset):
    """Rows of a `responses` artefact, or of supervised prompts: those of the `features` artefact that would be made of
    it, without the features."""

    def __init__(self, directory: Path, target: str, identity: Mapping[str, str]):
        """identity: the target's; responses must be its own, and supervised prompts of its tokenizer."""
        table = self._read_table(directory, open_texts(directory, target, identity, "data"), ["input_ids"])
        self._ids = Lists(table["input_ids"])

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self._ids.lengths.tolist()

    def __getitem__(self, row: int) -> Item:
        """Fields of FeatureBatch for one row: input_ids [T], loss_mask [T], position_ids [T]."""
        ids = torch.from_numpy(self._ids[row].astype(np.int64))
        mask = torch.from_numpy(self.answers.mask(row))
        return {"input_ids": ids, "loss_mask": mask, "position_ids": torch.arange(len(ids))}


class Pieces(Dataset):
    """A data set whose long samples are cut into pieces of at most `max_length` tokens, each a sample of its own.

    overlap: tokens that the next piece repeats, for heads that need some before the first one that counts.
    """

    def __init__(self, dataset: Any, max_length: int, overlap: int):
        assert 0 <= overlap < max_length
        self.dataset, self.manifest = dataset, dataset.manifest
        self._places: list[tuple[int, int, int]] = []
        for row, length in enumerate(dataset.lengths):
            starts = range(0, max(1, length - overlap), max_length - overlap)
            self._places += [(row, start, min(start + max_length, length)) for start in starts]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each piece."""
        return [stop - start for _, start, stop in self._places]

    @property
    def rows(self) -> list[int]:
        """The sample that each piece is of."""
        return [row for row, *_ in self._places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Item:
        return self.item(index, 0)

    def item(self, index: int, epoch: int) -> Item:
        """The fields of the sample's item, cut, with positions from 0."""
        row, start, stop = self._places[index]
        whole = item_of(self.dataset, row, epoch)
        cut = {name: value[start:stop] for name, value in whole.items()}
        return cut | ({"position_ids": torch.arange(stop - start)} if "position_ids" in cut else {})

    def name(self, index: int) -> str:
        """The name of the sample it is a piece of."""
        return name_of(self.dataset, self._places[index][0])


def in_pieces(dataset: Any, max_length: int, overlap: int = 0) -> Any:
    """The data set with no sample longer than `max_length`, which is the data set itself where none is."""
    return Pieces(dataset, max_length, overlap) if max(dataset.lengths, default=0) > max_length else dataset


def item_of(dataset: Any, index: int, epoch: int) -> Item:
    """A sample as it is in an epoch, for data sets whose samples change; else as it always is."""
    return dataset.item(index, epoch) if hasattr(dataset, "item") else dataset[index]


def answers_in(dataset: Any, indices: Sequence[int]) -> np.ndarray | None:
    """Tokens of every answer of the samples' rows; of a row that is in pieces, of the whole row, once. None for data
    without answers."""
    if isinstance(dataset, Pieces):
        rows = dataset.rows
        return answers_in(dataset.dataset, sorted({rows[i] for i in indices}))
    return dataset.answers.lengths(indices) if hasattr(dataset, "answers") else None


def conversations_of(dataset: Any) -> list[int]:
    """Which conversation each sample is of, as a number."""
    if isinstance(dataset, Pieces):
        own = conversations_of(dataset.dataset)
        return [own[row] for row in dataset.rows]
    return dataset.answers.conversations if hasattr(dataset, "answers") else list(range(len(dataset)))


def name_of(dataset: Any, index: int) -> str:
    """What a user knows a sample by: its id where it has one, else its number."""
    return dataset.name(index) if hasattr(dataset, "name") else f"row {index}"


def broken_features(path: Path, row: str, position: int) -> InputError:
    """The error of features that were read from a file and are NaN or infinite at a token."""
    remedy = "Its target was broken, or it was damaged: check the target, delete the file and make it again."
    return InputError(str(path), f"NaN or infinity in {row}, position {position}", "finite features", remedy)


def check_finite_labels(directory: Path, names: Rows, labels: Lists) -> None:
    """Raises InputError where acceptance probabilities are not finite."""
    place = labels.first_broken()
    if place is not None:
        found = f"{directory} with NaN or infinity in the labels of row {names.read(place, place + 1)[0]['id']}"
        raise InputError("data", found, "probabilities", "Check the models that labelled it, and make it again.")


class Lists:
    """A list column as one flat numpy array and offsets: a row is a slice, not Python numbers."""

    def __init__(self, column: pa.ChunkedArray):
        # Chunk by chunk: Arrow's own lists count in 32 bits, and as one chunk would end at 2^31 tokens.
        self._offsets = offsets_of(column)
        parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
        self._values = parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self._offsets)

    def __getitem__(self, row: int) -> np.ndarray:
        return self._values[self._offsets[row] : self._offsets[row + 1]]

    def first_broken(self) -> int | None:
        """The first row with a number that is not finite."""
        broken = np.flatnonzero(~np.isfinite(self._values))
        return int(np.searchsorted(self._offsets, broken[0], "right")) - 1 if len(broken) else None

    def answer_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of every answer in a column of loss masks, and which row each is of."""
        return answer_lengths(self._values, self._offsets)


class AnswerSpans:
    """Where the answers are in each row of a table."""

    def __init__(self, table: pa.Table):
        """table: with the columns that `answer_columns` names, and input_ids where there is no loss_mask."""
        names = set(table.column_names)
        self._masks = Lists(table["loss_mask"]) if "loss_mask" in names else None
        self._starts = None if self._masks else table["prompt_length"].to_numpy()
        self._ends = None if self._masks else Lists(table["input_ids"]).lengths
        self._turns = table["turn"].to_numpy() if "turn" in names else np.ones(table.num_rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._turns)

    def mask(self, row: int) -> np.ndarray:
        """[T] bool."""
        if self._masks is not None:
            return self._masks[row].astype(bool)
        assert self._starts is not None and self._ends is not None
        return np.arange(self._ends[row]) >= self._starts[row]

    def lengths(self, rows: Sequence[int]) -> np.ndarray:
        """Tokens of every answer of these rows."""
        if self._masks is None:
            assert self._starts is not None and self._ends is not None
            return (self._ends - self._starts)[np.asarray(rows, dtype=np.int64)]
        wanted = np.zeros(len(self), dtype=bool)
        wanted[np.asarray(rows, dtype=np.int64)] = True
        lengths, owner = self._masks.answer_lengths()
        return lengths[wanted[owner]]

    @property
    def conversations(self) -> list[int]:
        """Which conversation each row is of, counted from 0."""
        return conversation_numbers(self._turns)


def answer_columns(manifest: Manifest) -> list[str]:
    """The columns of this artefact that say where the answers are."""
    names = {spec.name for spec in manifest.fields}
    return [*(["loss_mask"] if "loss_mask" in names else ["prompt_length"]), *(["turn"] if "turn" in names else [])]


def offsets_of(column: pa.ChunkedArray) -> np.ndarray:
    """Where each row of a list column begins and the last one ends, in 64 bits [N+1]."""
    lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]
    return np.concatenate([[0], *lengths]).cumsum(dtype=np.int64)


def _generator(*key: object) -> np.random.Generator:
    """A stream of its own for every key."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def collate_acceptance(items: Sequence[Item]) -> AcceptanceTokens:
    """Rows padded at the right with zeros, false in both masks."""
    return AcceptanceTokens(**_padded(items), attention_mask=_attention_mask(items, "z_ids"))


def collate_features(items: Sequence[Item]) -> FeatureBatch:
    """Rows padded at the right with zeros, false in both masks. No features unless all rows have them: who computes
    some for this batch computes all."""
    fields: dict[str, Any] = {"features": None, **_padded(items)}
    return FeatureBatch(**fields, attention_mask=_attention_mask(items, "input_ids"))


def pack_features(items: Sequence[Item]) -> FeatureBatch:
    """Rows laid end to end, [1, N]: no padding (modules/packing.py). Features as `collate_features` has them."""
    flat: dict[str, Any] = {name: torch.cat([item[name] for item in items])[None] for name in _common(items)}
    flat = {"features": None, **flat}
    real = torch.ones_like(flat["loss_mask"])
    return FeatureBatch(**flat, attention_mask=real, lengths=tuple(len(item["input_ids"]) for item in items))


def _padded(items: Sequence[Item]) -> dict[str, Tensor]:
    def pad(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([item[name] for item in items], batch_first=True)

    return {name: pad(name) for name in _common(items)}


def _common(items: Sequence[Item]) -> list[str]:
    return [name for name in items[0] if all(name in item for item in items)]


def _attention_mask(items: Sequence[Item], name: str) -> Tensor:
    lengths = torch.tensor([len(item[name]) for item in items])
    return torch.arange(int(lengths.max()))[None] < lengths[:, None]

"""Artifacts as torch data sets: one row per sample, and collate functions that pad samples at the right.

A sample depends on (seed, epoch, row) only: not on the order of reading, nor on the process that reads it.
"""

from __future__ import annotations

import copy
import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from draftsmith.data.store.feature_codec import FeatureFiles, as_item, decode, decoded
from draftsmith.data.store.manifest import Manifest, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import row_uniforms
from draftsmith.modules.types import FeatureBatch, InputError

Item = dict[str, Tensor]
# Columns that the samples of a kind of artifact are made of.
TEXT_COLUMNS = ("input_ids", "loss_mask")
BATCH_COLUMNS = (*TEXT_COLUMNS, "features", "scale")
LABEL_COLUMNS = ("accept_prob", "log_q")
COLUMNS = {
    "prompts": TEXT_COLUMNS,
    "responses": TEXT_COLUMNS,
    "features": (*TEXT_COLUMNS, "row", "shard"),
    "acceptance": (*TEXT_COLUMNS, "draft_ids", *LABEL_COLUMNS),
    "rollouts": (*TEXT_COLUMNS, "starts", "draft_ids", *LABEL_COLUMNS, "reached"),
}


@dataclass(frozen=True)
class AcceptanceTokens:
    """A batch of text with drafted tokens mixed in, before the draft has read it. Position t of a row holds z_t.

    Where loss_mask is true, z_t is a drafted token and accept_prob and log_q are its labels; elsewhere they are 0.
    """

    z_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool
    accept_prob: Tensor  # [B, T] float32
    log_q: Tensor  # [B, T] float32
    attention_mask: Tensor  # [B, T] bool, false on padding


@dataclass(frozen=True)
class RolloutTokens:
    """N labeled drafts of K tokens, text after text, before the drafter has read them.

    starts: for each text, the positions of its drafts' first tokens. loss_mask: tokens that a round verifies.
    """

    input_ids: Tensor  # [T] int64, the texts end to end
    lengths: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    draft_ids: Tensor  # [N, K] int64
    loss_mask: Tensor  # [N, K] bool
    accept_prob: Tensor  # [N, K] float32
    log_q: Tensor  # [N, K] float32


class ArtifactDataset(Dataset):
    """Rows of an artifact, or pieces of them, as samples.

    lengths: tokens of each sample, [N] int64. rows: row of each sample, [N]. conversations: conversation of each
    sample, counted from 0, [N].
    """

    def __init__(self, manifest: Manifest, vocab_size: int | None, mix: float, seed: int):
        """manifest: as `open_artifact` returned it. For the rest see `open_dataset`."""
        self.directory, self.manifest = manifest.directory, manifest
        self._mix, self._seed = mix, seed
        is_text = "input_ids" in manifest.field_names
        self._ids = "input_ids" if is_text else "prompt_ids"
        names = ["id", *(COLUMNS[manifest.kind] if is_text else (self._ids,))]
        names += ["turn"] if "turn" in manifest.field_names else []
        self._table = Rows(self.directory, manifest, names, vocab_size=vocab_size).table()
        self._lists = [name for name in names if pa.types.is_list(self._table[name].type)]
        self._files = FeatureFiles(self.directory)

        self.lengths = pc.list_value_length(self._table[self._ids]).to_numpy().astype(np.int64)
        self.rows = np.arange(len(self.lengths))
        # A row that continues the conversation before it begins at a later turn.
        begins = np.ones(len(self.rows), dtype=bool)
        if "turn" in names:
            ids = pc.replace_substring_regex(self._table["id"], r"/turn-\d+$", "").to_numpy()
            begins[1:] = (self._table["turn"].to_numpy()[1:] == 1) | (ids[1:] != ids[:-1])
        self.conversations = np.cumsum(begins) - 1
        self._starts: np.ndarray | None = None

    def _values(self, name: str, row: int) -> np.ndarray:
        """Return a row's list as a slice of Arrow's memory, without Python numbers."""
        return self._table[name][row].values.to_numpy(zero_copy_only=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        """Return the sample of epoch 0, its features in bf16."""
        item = self.item(index, 0)
        if "features" in item:
            item["features"] = decoded(item["features"], item.pop("scale", None))
        return item

    def item(self, index: int, epoch: int) -> Item:
        """Return a sample as it is in an epoch.

        Texts have input_ids [T] int64 and loss_mask [T] bool (prompts without answers have no mask); features beside
        them features [T, L*H] in bf16, or in fp8 with scale [T]. For acceptance labels see `_mixed_item`, for rollouts
        `_rollout_item`.
        """
        row, kind = int(self.rows[index]), self.manifest.kind
        # Rollouts are never cut: a draft belongs to its whole text.
        if kind == "rollouts":
            return self._rollout_item(row, epoch)
        if kind == "acceptance":
            item = self._mixed_item(row, epoch)
        else:
            item = {"input_ids": torch.from_numpy(self._values(self._ids, row).astype(np.int64))}
            if "loss_mask" in self._lists:
                item["loss_mask"] = torch.from_numpy(self._values("loss_mask", row))
        if kind == "features":
            shard, number = (self._table[name][row].as_py() for name in ("shard", "row"))
            item |= as_item(self._files.read(shard, feature_key(number), f"row {self.name(index)}"))
        # Cut all fields alike: each has one value per token.
        if self._starts is not None:
            start = int(self._starts[index])
            item = {name: value[start : start + self.lengths[index]] for name, value in item.items()}
        return item

    def _mixed_item(self, row: int, epoch: int) -> Item:
        """Mix drafted tokens into a labeled text, anew in every epoch (SpecDec++, section 3.3).

        z_t is the target's token x_t with probability `mix`, else the drafted y_t; the loss counts the latter only.
        Returns z_ids [T] int64, loss_mask [T] bool, and accept_prob and log_q [T] float32.
        """
        ids = self._values("input_ids", row).astype(np.int64)
        # Labels belong to the answers' positions, in order.
        positions = np.flatnonzero(self._values("loss_mask", row))
        kept = row_uniforms(f"mix/{self._seed}", epoch, row, len(positions)) >= self._mix
        # The loss counts drafted tokens only.
        drafted = np.zeros(len(ids), dtype=bool)
        drafted[positions] = kept
        ids[drafted] = self._values("draft_ids", row)[kept]
        item = {"z_ids": torch.from_numpy(ids), "loss_mask": torch.from_numpy(drafted)}
        for name in LABEL_COLUMNS:
            values = np.zeros(len(ids), dtype=np.float32)
            values[drafted] = self._values(name, row)[kept]
            item[name] = torch.from_numpy(values)
        return item

    def _rollout_item(self, row: int, epoch: int) -> Item:
        """Return input_ids [T], starts [S], and draft_ids, loss_mask and labels of the S drafts, [S, K] each.

        The loss counts the tokens that a round verifies, drawn anew in every epoch.
        """
        ids, starts, drafted, reached = (
            torch.tensor(self._values(name, row)) for name in ("input_ids", "starts", "draft_ids", "reached")
        )
        shape = len(starts), -1
        item = {"input_ids": ids.long(), "starts": starts.long(), "draft_ids": drafted.long().view(shape)}
        # One number a draft: `reached` falls along it, so that the loss counts a draft's beginning.
        uniforms = torch.from_numpy(row_uniforms(f"reached/{self._seed}", epoch, row, len(starts)))
        item["loss_mask"] = uniforms[:, None] < reached.view(shape)
        return item | {name: torch.tensor(self._values(name, row)).view(shape) for name in LABEL_COLUMNS}

    @property
    def id_range(self) -> tuple[int, int]:
        """Return the smallest and the largest token id."""
        bounds = pc.min_max(pc.list_flatten(self._table[self._ids])).as_py()
        return bounds["min"], bounds["max"]

    def name(self, index: int) -> str:
        """Return the id of the sample's row."""
        return self._table["id"][int(self.rows[index])].as_py()

    def in_pieces(self, max_length: int, overlap: int = 0) -> ArtifactDataset:
        """Cut samples into pieces of at most `max_length` tokens, each a sample; return self if none is longer.

        overlap: tokens that the next piece repeats, for heads that read some before the first that counts.
        """
        if np.max(self.lengths, initial=0) <= max_length:
            return self
        pieces = copy.copy(self)
        samples, pieces._starts, pieces.lengths = cut_lengths(self.lengths, max_length, overlap)
        pieces.rows, pieces.conversations = self.rows[samples], self.conversations[samples]
        return pieces

    def answer_lengths(self, samples: Sequence[int]) -> np.ndarray:
        """Return the tokens of every answer in the rows that these samples belong to, each row once."""
        lengths, rows = answer_lengths(self._table["loss_mask"])
        return lengths[np.isin(rows, self.rows[np.asarray(samples, dtype=np.int64)])]

    def token_counts(self, samples: Sequence[int], vocab_size: int) -> Tensor:
        """Count how often each token [vocab_size] occurs in the answers of these samples' rows, each row once."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for ids, mask in self.whole_texts(samples):
            counts += np.bincount(ids[mask], minlength=vocab_size)
        return torch.from_numpy(counts)

    def whole_texts(self, samples: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield input_ids and loss_mask of the rows that these samples belong to, each row once."""
        for row in dict.fromkeys(self.rows[np.asarray(samples, dtype=np.int64)].tolist()):
            yield self._values("input_ids", row), self._values("loss_mask", row)

    def whole_items(self, samples: Sequence[int]) -> Iterator[Item]:
        """Yield the rows that these samples belong to as `item` returns them, whole and each once."""
        rows = copy.copy(self)
        rows.rows, rows._starts = np.array(list(dict.fromkeys(self.rows[np.asarray(samples)].tolist()))), None
        return (rows.item(row, 0) for row in range(len(rows.rows)))


def open_dataset(
    directory: str | Path,
    kind: str | tuple[str, ...] | None = None,
    identity: Mapping[str, Any] | None = None,
    check: str = "sha256",
    vocab_size: int | None = None,
    mix: float = 0.15,
    seed: int = 0,
) -> ArtifactDataset:
    """Open what a data command wrote as a torch data set: prompts, responses, features, acceptance or rollouts.

    kind, identity, check: what the artifact must be, as of `open_artifact`. vocab_size: of the model that reads it, to
    check token ids. mix, seed: of acceptance labels, the share of the target's own tokens, and the seed.

    Raises:
        InputError: no such artifact, or one that is incomplete, damaged or made with other models.
    """
    if not 0 <= mix < 1:
        raise InputError("mix", mix, "a probability in [0, 1)", "The paper's is 0.15.")
    manifest = open_artifact(Path(directory), kind or tuple(COLUMNS), identity, check)
    return ArtifactDataset(manifest, vocab_size, mix, seed)


def as_dataset(directory: str | Path) -> Any:
    """Open what a data command wrote as a `datasets.Dataset`: prompts, responses, features, acceptance or rollouts.

    Rows have the artifact's columns, numbers as torch tensors (`with_format(None)`: as Python's). Rows of features
    have `features` [T, L*H] in bf16 beside them, read from their files when a row is asked for.

    Raises:
        InputError: no such artifact, or one that is incomplete or damaged.
    """
    import datasets

    manifest = open_artifact(Path(directory), tuple(COLUMNS))
    directory = manifest.directory
    tables = [glob.escape(str(directory / entry.name)) for entry in manifest.files if entry.name.endswith(".parquet")]
    with quiet_datasets():
        # The content's hash names the copy in the cache of `datasets`.
        rows = datasets.load_dataset("parquet", manifest.digest, data_files=tables, split="train").with_format("torch")
    if manifest.kind != "features":
        return rows
    files = FeatureFiles(directory)

    def with_features(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Add the features to rows, unless the columns that say where they are were left out."""
        batch |= {name: [torch.tensor(values) for values in batch[name]] for name in TEXT_COLUMNS if name in batch}
        if batch.keys() >= {"shard", "row"}:
            places = zip(batch["shard"], batch["row"], strict=True)
            batch["features"] = [decode(files.read(shard, feature_key(row), f"row {row}")) for shard, row in places]
        return batch

    return rows.with_transform(with_features)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keep `datasets` from printing bars and errors, which our own lines stand for."""
    import datasets

    level, hidden = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not hidden:
            datasets.enable_progress_bars()


def cut_lengths(lengths: np.ndarray, max_length: int, overlap: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut samples of these lengths [N] into pieces, as of `in_pieces`; return their samples, starts and lengths [P]."""
    assert 0 <= overlap < max_length
    # The last piece of a sample is what is left, more than the overlap.
    stride = max_length - overlap
    counts = -(-np.maximum(1, lengths - overlap) // stride)
    samples = np.arange(len(lengths)).repeat(counts)
    starts = (np.arange(len(samples)) - (counts.cumsum() - counts).repeat(counts)) * stride
    return samples, starts, np.minimum(max_length, lengths[samples] - starts)


def feature_key(row: int) -> str:
    """Return the key of a row's features in its safetensors file."""
    return f"{row:07d}"


def answer_lengths(masks: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of every answer in loss masks, and the row of each."""
    lengths, rows, start = [], [], 0
    for chunk in masks.chunks:
        mask = chunk.flatten().to_numpy(zero_copy_only=False)
        owner = np.arange(len(chunk)).repeat(chunk.value_lengths())  # row of each token
        # An answer begins where the mask turns true. A row's first token begins one whatever the row before ended with.
        begins = mask.copy()
        begins[1:] &= ~mask[:-1] | (owner[1:] != owner[:-1])
        lengths.append(np.bincount(np.cumsum(begins)[mask] - 1, minlength=int(begins.sum())))
        rows.append(start + owner[begins])
        start += len(chunk)
    return np.concatenate(lengths), np.concatenate(rows)


def collate_acceptance(items: Sequence[Item]) -> AcceptanceTokens:
    """Pad rows at the right with zeros, false in both masks."""
    return AcceptanceTokens(**_pad(items, "z_ids"))


def collate_rollouts(items: Sequence[Item]) -> RolloutTokens:
    """Concatenate the drafts of several responses."""
    return RolloutTokens(
        lengths=tuple(len(item["input_ids"]) for item in items),
        starts=tuple(tuple(item["starts"].tolist()) for item in items),
        **{name: torch.cat([item[name] for item in items]) for name in items[0] if name != "starts"},
    )


def collate_features(items: Sequence[Item]) -> FeatureBatch:
    """Pad rows at the right with zeros, false in both masks; other columns are left out.

    There are no features unless all rows have them: they are computed for whole batches.
    """
    items = [{name: item[name] for name in BATCH_COLUMNS if name in item} for item in items]
    fields: dict[str, Any] = {"features": None, **_pad(items, "input_ids")}
    attended = fields["attention_mask"]  # [B, T]
    return FeatureBatch(**fields, position_ids=torch.arange(attended.shape[1]) * attended)


def pack_features(items: Sequence[Item]) -> FeatureBatch:
    """Lay rows end to end without padding, [1, N] (modules/attention.py). Features as of `collate_features`."""
    lengths = tuple(len(item["input_ids"]) for item in items)
    names = [name for name in BATCH_COLUMNS if all(name in item for item in items)]
    fields: dict[str, Any] = {"features": None} | {name: torch.cat([i[name] for i in items])[None] for name in names}
    fields["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]  # [1, N]
    return FeatureBatch(**fields, attention_mask=torch.ones_like(fields["loss_mask"]), lengths=lengths)


def _pad(items: Sequence[Item], ids: str) -> dict[str, Tensor]:
    """Pad the fields that all items have; attention_mask is true on the tokens of `ids`."""
    names = [name for name in items[0] if all(name in item for item in items)]
    padded = {name: pad_sequence([item[name] for item in items], batch_first=True) for name in names}
    lengths = torch.tensor([len(item[ids]) for item in items])
    padded["attention_mask"] = torch.arange(int(lengths.max()))[None] < lengths[:, None]  # [B, T]
    return padded

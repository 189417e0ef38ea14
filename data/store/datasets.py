"""Artifacts as torch data sets: one row per sample, and collate functions that pad samples at the right.

A sample depends on (seed, epoch, row) only: not on the order of reading, nor on the process that reads it.
"""

from __future__ import annotations

import copy
import glob
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from draftsmith.data.store.feature_codec import FeatureFiles, as_item, decode, decoded
from draftsmith.data.store.manifest import Manifest, agree, joined_digest, open_artifact
from draftsmith.data.store.parts import Data, parts_of
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import row_uniforms
from draftsmith.data.store.spool import row_name
from draftsmith.modules.types import FeatureBatch, InputError

Item = dict[str, Tensor]
# Columns that the samples of a kind of artifact are made of.
TEXT_COLUMNS = ("input_ids", "loss_mask")
BATCH_COLUMNS = (*TEXT_COLUMNS, "features", "scale")
LABEL_COLUMNS = ("accept_prob", "log_q")
MOST_PAIRS = 2**22  # of neighboring tokens that are counted
VAL_SHARE = 0.05  # of the prompts, which a training holds out by default
# What the id of a later row of a session ends in.
TURN = re.compile(r"/turn-\d+$")
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


class Artifact:
    """Rows of one artifact, and the files of their features.

    weight: how many times an epoch has its rows. table: columns that samples are made of. ids: name of the column of
    token ids. has_mask: whether it has loss_mask. lengths: tokens of each row, [R] int64. begins: whether a row begins
    a conversation, [R].
    """

    def __init__(self, manifest: Manifest, weight: float, vocab_size: int | None):
        """manifest: as `open_artifact` returned it. vocab_size: as of `open_dataset`."""
        self.manifest, self.weight, self.files = manifest, weight, FeatureFiles(manifest.directory)
        self.has_mask = "input_ids" in manifest.field_names
        self.ids = "input_ids" if self.has_mask else "prompt_ids"
        names = ["id", *(COLUMNS[manifest.kind] if self.has_mask else (self.ids,))]
        names += ["turn"] if "turn" in manifest.field_names else []
        self.table = Rows(manifest, names, vocab_size=vocab_size).table()
        self.lengths = pc.list_value_length(self.table[self.ids]).to_numpy().astype(np.int64)
        # A row that continues the conversation before it begins at a later turn.
        self.begins = np.ones(len(self.lengths), dtype=bool)
        if "turn" in names:
            ids = pc.replace_substring_regex(self.table["id"], TURN.pattern, "").to_numpy()
            self.begins[1:] = (self.table["turn"].to_numpy()[1:] == 1) | (ids[1:] != ids[:-1])

    def values(self, name: str, row: int) -> np.ndarray:
        """Return a row's list as a slice of Arrow's memory, without Python numbers."""
        return self.table[name][row].values.to_numpy(zero_copy_only=False)


class ArtifactDataset(Dataset):
    """Rows of artifacts, or pieces of them, as samples: those of an epoch, as often as the weights say.

    A weight of 2.25 is two copies of every sample and a third one of a quarter of the conversations, which are the same
    in every epoch. Mixed tokens are drawn anew for every copy.

    lengths: tokens of each sample, [N] int64. rows, conversations: of each sample, counted from 0 through all
    artifacts, [N]. copies: number of each sample's copy, from 0, [N]. manifest, digest: of all artifacts together
    (`agree`, `joined_digest`). manifests: of each.
    """

    def __init__(self, artifacts: Sequence[Artifact], manifest: Manifest, digest: str, mix: float, seed: int):
        """mix, seed: as of `open_dataset`."""
        self.artifacts, self.manifest, self.digest = artifacts, manifest, digest
        self.manifests = tuple(artifact.manifest for artifact in artifacts)
        self._mix, self._seed = mix, seed
        sizes = [len(artifact.lengths) for artifact in artifacts]
        self._first = np.cumsum([0, *sizes])  # row of each artifact, and the number of all
        self._starts: np.ndarray | None = None
        self.lengths = np.concatenate([artifact.lengths for artifact in artifacts])
        self.conversations = np.cumsum(np.concatenate([artifact.begins for artifact in artifacts])) - 1
        self.rows = np.arange(len(self.lengths))

        times = np.repeat([int(artifact.weight) for artifact in artifacts], sizes)
        for artifact, first, size in zip(artifacts, self._first, sizes, strict=False):
            if share := artifact.weight % 1:
                own = slice(first, first + size)
                # Other bits than those that hold samples out.
                chosen = self.hashes[own] & np.uint64(0xFFFFFFFF)
                ordered = np.unique(chosen)
                times[own] += chosen <= ordered[max(round(share * len(ordered)), 1) - 1]
        self._take(self.rows.repeat(times))
        self.copies = np.arange(times.sum()) - (times.cumsum() - times).repeat(times)

    def _take(self, samples: np.ndarray) -> None:
        """Keep these samples, as often as they are named."""
        self.__dict__.pop("hashes", None)
        self.lengths, self.rows = self.lengths[samples], self.rows[samples]
        self.conversations = self.conversations[samples]

    def _artifact(self, row: int) -> tuple[Artifact, int]:
        """Return the artifact that a row belongs to, and its number there."""
        number = int(np.searchsorted(self._first, row, "right")) - 1
        return self.artifacts[number], row - int(self._first[number])

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
        artifact, row = self._artifact(int(self.rows[index]))
        kind, epoch = artifact.manifest.kind, epoch * math.ceil(artifact.weight) + int(self.copies[index])
        # Rollouts are never cut: a draft belongs to its whole text.
        if kind == "rollouts":
            return self._rollout_item(artifact, row, epoch)
        if kind == "acceptance":
            item = self._mixed_item(artifact, row, epoch)
        else:
            item = {"input_ids": torch.from_numpy(artifact.values(artifact.ids, row).astype(np.int64))}
            if artifact.has_mask:
                item["loss_mask"] = torch.from_numpy(artifact.values("loss_mask", row))
        if kind == "features":
            shard, key = (artifact.table[name][row].as_py() for name in ("shard", "row"))
            item |= as_item(artifact.files.read(shard, feature_key(key), f"row {self.name(index)}"))
        # Cut all fields alike: each has one value per token.
        if self._starts is not None:
            start = int(self._starts[index])
            item = {name: value[start : start + self.lengths[index]] for name, value in item.items()}
        return item

    def _mixed_item(self, artifact: Artifact, row: int, epoch: int) -> Item:
        """Mix drafted tokens into a labeled text, anew in every epoch (SpecDec++, section 3.3).

        z_t is the target's token x_t with probability `mix`, else the drafted y_t; the loss counts the latter only.
        Returns z_ids [T] int64, loss_mask [T] bool, and accept_prob and log_q [T] float32.
        """
        ids = artifact.values("input_ids", row).astype(np.int64)
        # Labels belong to the answers' positions, in order.
        positions = np.flatnonzero(artifact.values("loss_mask", row))
        kept = row_uniforms(f"mix/{self._seed}", epoch, row, len(positions)) >= self._mix
        # The loss counts drafted tokens only.
        drafted = np.zeros(len(ids), dtype=bool)
        drafted[positions] = kept
        ids[drafted] = artifact.values("draft_ids", row)[kept]
        item = {"z_ids": torch.from_numpy(ids), "loss_mask": torch.from_numpy(drafted)}
        for name in LABEL_COLUMNS:
            values = np.zeros(len(ids), dtype=np.float32)
            values[drafted] = artifact.values(name, row)[kept]
            item[name] = torch.from_numpy(values)
        return item

    def _rollout_item(self, artifact: Artifact, row: int, epoch: int) -> Item:
        """Return input_ids [T], starts [S], and draft_ids, loss_mask and labels of the S drafts, [S, K] each.

        The loss counts the tokens that a round verifies, drawn anew in every epoch.
        """
        ids, starts, drafted, reached = (
            torch.tensor(artifact.values(name, row)) for name in ("input_ids", "starts", "draft_ids", "reached")
        )
        shape = len(starts), -1
        item = {"input_ids": ids.long(), "starts": starts.long(), "draft_ids": drafted.long().view(shape)}
        # One number a draft: `reached` falls along it, so that the loss counts a draft's beginning.
        uniforms = torch.from_numpy(row_uniforms(f"reached/{self._seed}", epoch, row, len(starts)))
        item["loss_mask"] = uniforms[:, None] < reached.view(shape)
        return item | {name: torch.tensor(artifact.values(name, row)).view(shape) for name in LABEL_COLUMNS}

    @cached_property
    def hashes(self) -> np.ndarray:
        """Hash of the prompt that each sample's conversation begins with, [N] uint64."""
        conversations, first = np.unique(self.conversations, return_index=True)
        hashes = []
        for artifact, row in map(self._artifact, self.rows[first].tolist()):
            mask = artifact.values("loss_mask", row) if artifact.has_mask else None
            hashes.append(prompt_hash(artifact.values(artifact.ids, row), mask))
        return np.array(hashes, dtype=np.uint64)[np.searchsorted(conversations, self.conversations)]

    @property
    def recorded(self) -> list[dict[str, Any]]:
        """Joined artifacts with their weights and the sampling of their answers, as a trained head's manifest has them;
        none for one that is taken once."""
        parts = [(artifact.manifest, artifact.weight) for artifact in self.artifacts]
        recorded = [{"digest": one.digest, "weight": weight, "sampling": one.sampling} for one, weight in parts]
        return [] if recorded[0]["weight"] == len(recorded) == 1 else recorded

    @property
    def id_range(self) -> tuple[int, int]:
        """Return the smallest and the largest token id."""
        bounds = [pc.min_max(pc.list_flatten(each.table[each.ids])).as_py() for each in self.artifacts]
        return min(bound["min"] for bound in bounds), max(bound["max"] for bound in bounds)

    def name(self, index: int) -> str:
        """Return the id of the sample's row."""
        artifact, row = self._artifact(int(self.rows[index]))
        return artifact.table["id"][row].as_py()

    def in_pieces(self, max_length: int, overlap: int = 0) -> ArtifactDataset:
        """Cut samples into pieces of at most `max_length` tokens, each a sample; return self if none is longer.

        overlap: tokens that the next piece repeats, for heads that read some before the first that counts.
        """
        if np.max(self.lengths, initial=0) <= max_length:
            return self
        pieces = copy.copy(self)
        samples, starts, lengths = cut_lengths(self.lengths, max_length, overlap)
        # Copies of a piece stand side by side.
        order = np.lexsort((self.copies[samples], starts, self.rows[samples]))
        pieces._take(samples[order])
        pieces.copies, pieces._starts, pieces.lengths = self.copies[samples[order]], starts[order], lengths[order]
        return pieces

    def answer_lengths(self, samples: Sequence[int]) -> np.ndarray:
        """Return the tokens of every answer in the rows that these samples belong to, each row once."""
        found, chosen = [], self.rows[np.asarray(samples, dtype=np.int64)]
        for artifact, first in zip(self.artifacts, self._first, strict=False):
            lengths, rows = answer_lengths(artifact.table["loss_mask"])
            found.append(lengths[np.isin(rows + first, chosen)])
        return np.concatenate(found)

    def token_counts(self, samples: Sequence[int], vocab_size: int) -> Tensor:
        """Count how often each token [vocab_size] occurs in the answers of these samples' rows, each row once."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for ids, mask in self.whole_texts(samples):
            counts += np.bincount(ids[mask], minlength=vocab_size)
        return torch.from_numpy(counts)

    def pair_counts(self, samples: Sequence[int], vocab_size: int) -> torch.Tensor:
        """Count how often each token of an answer follows each other one: [V, V], sparse, a row for the token before.

        Of the first rows of these samples, that hold MOST_PAIRS pairs.
        """
        found, left = list[np.ndarray](), MOST_PAIRS
        for ids, mask in self.whole_texts(samples):
            places = mask[1:].nonzero()[0][:left]
            found.append(ids[places] * np.int64(vocab_size) + ids[places + 1])
            left -= len(places)
            if not left:
                break
        pairs, counts = np.unique(np.concatenate(found), return_counts=True)
        indices, values = torch.from_numpy(np.stack(np.divmod(pairs, vocab_size))), torch.from_numpy(counts)
        size = (vocab_size, vocab_size)
        return torch.sparse_coo_tensor(indices, values.float(), size, check_invariants=False, is_coalesced=True)

    def whole_texts(self, samples: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield input_ids and loss_mask of the rows that these samples belong to, each row once."""
        for artifact, row in map(self._artifact, self._distinct(samples)):
            yield artifact.values("input_ids", row), artifact.values("loss_mask", row)

    def whole_items(self, samples: Sequence[int]) -> Iterator[Item]:
        """Yield the rows that these samples belong to as `item` returns them, whole and each once."""
        rows = copy.copy(self)
        rows.rows, rows._starts = np.array(self._distinct(samples), dtype=np.int64), None
        rows.copies = np.zeros_like(rows.rows)
        return (rows.item(row, 0) for row in range(len(rows.rows)))

    def _distinct(self, samples: Sequence[int]) -> list[int]:
        """Return the rows that these samples belong to, each once."""
        return list(dict.fromkeys(self.rows[np.asarray(samples, dtype=np.int64)].tolist()))


def open_dataset(
    data: Data,
    kind: str | tuple[str, ...] | None = None,
    identity: Mapping[str, Any] | None = None,
    check: str = "sha256",
    vocab_size: int | None = None,
    mix: float = 0.15,
    seed: int = 0,
) -> ArtifactDataset:
    """Open what data commands wrote as a torch data set: prompts, responses, features, acceptance or rollouts.

    data: a directory, or several, each `DIR` or `DIR*N`: an epoch has the rows of that one N times. Their order does
    not matter. kind, identity, check: what each must be, as of `open_artifact`. vocab_size: of the model
    that reads it, to check token ids. mix, seed: of acceptance labels, the share of the target's own tokens, and the
    seed.

    Raises:
        InputError: no such artifact, or one that is incomplete, damaged or made with other models; artifacts that do
            not belong together (`agree`), or the same twice.
    """
    if not 0 <= mix < 1:
        raise InputError("mix", mix, "a probability in [0, 1)", "The paper's is 0.15.")
    parts = parts_of(data)
    manifests = [Manifest.read(part.path) for part in parts]
    manifest, digest = agree(parts, manifests), joined_digest(parts, manifests)
    opened = [(open_artifact(part.path, kind or tuple(COLUMNS), identity, check), part.weight) for part in parts]
    opened.sort(key=lambda pair: pair[0].digest)
    if len(opened) == 1 and opened[0][1] == 1:
        manifest = opened[0][0]
    artifacts = [Artifact(one, weight, vocab_size) for one, weight in opened]
    return ArtifactDataset(artifacts, manifest, digest, mix, seed)


def as_dataset(data: Data) -> Any:
    """Open what data commands wrote as a `datasets.Dataset`: prompts, responses, features, acceptance or rollouts.

    data: a directory, or several, each `DIR` or `DIR*N`: it has the rows of that one N times. Rows have the artifacts'
    columns, numbers as torch tensors (`with_format(None)`: as Python's). Rows of features have `features` [T, L*H] in
    bf16 beside them, read from their files when a row is asked for.

    Raises:
        InputError: as `open_dataset`.
    """
    import datasets

    opened, tables = open_dataset(data), []
    with quiet_datasets():
        for number, manifest in enumerate(opened.manifests):
            names = [entry.name for entry in manifest.files if entry.name.endswith(".parquet")]
            files = [glob.escape(str(manifest.directory / name)) for name in names]
            # The content's hash names the copy in the cache of `datasets`.
            rows = datasets.load_dataset("parquet", manifest.digest, data_files=files, split="train")
            if len(opened.manifests) > 1:
                rows = rows.add_column("artifact", np.full(len(rows), number))
            tables.append(rows)
        rows = datasets.concatenate_datasets(tables).select(opened.rows).with_format("torch")
    if opened.manifest.kind != "features":
        return rows
    readers = [artifact.files for artifact in opened.artifacts]

    def with_features(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Add the features to rows, unless the columns that say where they are were left out."""
        batch |= {name: [torch.tensor(values) for values in batch[name]] for name in TEXT_COLUMNS if name in batch}
        if batch.keys() >= {"shard", "row"}:
            owners = batch.get("artifact", [0] * len(batch["row"]))
            places = zip(owners, batch["shard"], batch["row"], strict=True)
            stored = (readers[owner].read(shard, feature_key(row), f"row {row}") for owner, shard, row in places)
            batch["features"] = [decode(one) for one in stored]
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


def prompt_hash(ids: np.ndarray, mask: np.ndarray | None) -> int:
    """Return a hash of 64 bits of the token ids in front of the first answer; of all if there are none.

    Held-out rows, and shares of an artifact, are chosen by it: other answers to a prompt go where the first ones go.

    ids, mask: [T], the mask true on answers.
    """
    num_asked = int(mask.argmax()) if mask is not None and mask.any() else 0
    return int(row_name(ids[:num_asked] if num_asked else ids)[:16], 16)


def is_held_out(hashes: np.ndarray, share: float = VAL_SHARE) -> np.ndarray:
    """Return which prompts [N], by their hashes, a training on their answers leaves out."""
    # The upper half: a share of an artifact is taken by the lower one.
    return (hashes >> np.uint64(32)) < int(share * 2**32)


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

"""`train NAME --features cache`: features are written as they are first computed, and read from then on.

A row's name is a hash of its token ids: features depend on nothing else but the target, so the order of samples, the
number of ranks, how samples are cut or packed, and which data set they come from do not matter. Ranks and runs may
share a directory. What training sees is the same whether it was computed or read: computed features are rounded as the
stored ones are.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.store import feature_codec
from draftsmith.data.store.feature_codec import FeatureDtype, FeatureFiles
from draftsmith.data.store.files import CannotWrite, check_disk, make_directory, write_json, write_tensors
from draftsmith.data.store.manifest import changes
from draftsmith.data.store.reading import read_object
from draftsmith.modules.finite import first_broken
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from draftsmith.train.data_module import Samples

ABOUT = "cache.json"
# In memory twice at most, while one shard is written and the next gathered; what a killed run computes again.
SHARD_BYTES = 256 * 2**20
# Rows that other ranks wrote are found by listing the directory, which is not worth it for each that is missing.
LOOK_EVERY_S = 1.0
LEFTOVER_S = 3600.0


def row_name(input_ids: Tensor) -> str:
    """Name of the row with these token ids [T]."""
    return hashlib.blake2b(input_ids.to(torch.int32).numpy().tobytes(), digest_size=16).hexdigest()


class FeatureCache:
    """A directory of safetensors shards that only grows. A shard is there whole or not at all."""

    def __init__(self, directory: Path, identity: Mapping[str, Any], dtype: FeatureDtype, model_dtype: str):
        """identity: the target's. model_dtype: what it computes in.

        Raises:
            InputError: the directory holds features of another target or dtype, or is something else.
        """
        self._directory, self.dtype = Path(directory), dtype
        self._begin({"kind": "feature-cache", "target": dict(identity), "dtype": dtype, "model_dtype": model_dtype})
        self._shards: set[str] = set()
        self._where: dict[str, str] = {}
        self._files = FeatureFiles(self._directory, "Delete it: its rows are computed again.")
        self._unwritten: dict[str, dict[str, Tensor]] = {}  # encoded
        self._new_bytes = 0  # of those that no shard is being written of
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[tuple[str, list[str]]] | None = None
        self._full = False
        self._looked = -LOOK_EVERY_S
        self._look()

    @property
    def num_rows(self) -> int:
        """Rows that are there, as far as this process has seen."""
        return len(self._where) + len(self._unwritten)

    def get(self, input_ids: Tensor) -> Tensor | None:
        """The features [T, H] (bf16) of a row with token ids [T], if they are there."""
        stored = self._stored(input_ids)
        return None if stored is None else feature_codec.decode(stored)

    def item(self, input_ids: Tensor) -> dict[str, Tensor]:
        """A sample's features as they are stored (`feature_codec.as_item`), by its token ids [T], if they are there."""
        stored = self._stored(input_ids)
        return {} if stored is None else feature_codec.as_item(stored)

    def _stored(self, input_ids: Tensor) -> dict[str, Tensor] | None:
        name = row_name(input_ids)
        if name in self._unwritten:
            return self._unwritten[name]
        if name not in self._where:
            self._look()
        shard = self._where.get(name)
        return None if shard is None else self._files.read(shard, name, f"row {name}")

    def put(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """Keep the features [T, H] of a row with token ids [T] (on the CPU); they are returned as `get` gives them."""
        encoded = feature_codec.encode(features, self.dtype)
        name = row_name(input_ids)
        known = name in self._where or name in self._unwritten
        if not (self._full or known) and first_broken(features) is None:
            # Copies: the batch that they are slices of would stay in memory.
            self._unwritten[name] = {suffix: tensor.to("cpu", copy=True) for suffix, tensor in encoded.items()}
            self._new_bytes += sum(tensor.nbytes for tensor in encoded.values())
            if self._new_bytes >= SHARD_BYTES:
                self.flush(wait=False)
        return feature_codec.decode(encoded)

    def flush(self, wait: bool = True) -> None:
        """Write what has been put. wait: return when it is on the disk."""
        self._collect()
        if self._unwritten:
            self._new_bytes = 0
            self._writer = self._writer or ThreadPoolExecutor(1)
            self._writing = self._writer.submit(self._write, dict(self._unwritten))
        if wait:
            self._collect()

    def missing_tokens(self, rows: Iterable[Tensor]) -> int:
        """Tokens of the rows, each given by its ids, that are not there; a row that occurs twice counts once."""
        lengths = {row_name(ids): len(ids) for ids in rows}
        return sum(length for name, length in lengths.items() if name not in self._where)

    def _collect(self) -> None:
        """Wait for the shard that is being written, if any. A disk that is full ends the writing, not the training."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            shard, names = writing.result()
        except (OSError, CannotWrite) as error:
            self._full, self._unwritten = True, {}
            log_note(f"feature cache: {self._directory}: {error}. Nothing more is cached; training goes on without.")
            return
        self._shards.add(shard)
        self._where |= dict.fromkeys(names, shard)
        for name in names:
            del self._unwritten[name]

    def _write(self, rows: dict[str, dict[str, Tensor]]) -> tuple[str, list[str]]:
        """The shard's name and its rows', once it is on the disk. Names are drawn: runs that share the directory agree
        on none."""
        shard = f"{uuid.uuid4().hex}.safetensors"
        tensors = {name + suffix: tensor for name, row in rows.items() for suffix, tensor in row.items()}
        write_tensors(self._directory / shard, tensors)
        return shard, list(rows)

    def _begin(self, about: dict[str, Any]) -> None:
        directory, path = self._directory, self._directory / ABOUT
        make_directory(directory)
        if path.exists():
            if changed := changes(about, read_object(path, {}, "Delete the cache's directory.")):
                found, remedy = f"{directory} with another {changed}", "Delete it, or pass another --feature-cache."
                raise InputError("feature_cache", found, "features of this target and dtype", remedy)
        elif any(".tmp" not in entry.name for entry in directory.iterdir()):
            # Another rank may have written it since.
            if not path.exists():
                remedy = "Choose a new one."
                raise InputError("feature_cache", f"{directory}, which holds something else", "a cache", remedy)
        else:
            write_json(path, about)
        for leftover in directory.glob("*.tmp*"):  # of killed runs; a live one's is younger
            if time.time() - leftover.stat().st_mtime > LEFTOVER_S:
                leftover.unlink(missing_ok=True)

    def _look(self) -> None:
        """Take in the shards that came since, whoever wrote them."""
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        for path in self._directory.glob("*.safetensors"):
            if path.name not in self._shards:
                self._where |= dict.fromkeys(self._files.keys(path.name), path.name)
                self._shards.add(path.name)

    def __getstate__(self) -> dict[str, Any]:
        """State for a reader process: it reads what is on the disk."""
        return {**self.__dict__, "_unwritten": {}, "_writer": None, "_writing": None}


def check_cache_room(cache: FeatureCache, samples: Sequence[Samples], width: int, directory: Path) -> None:
    """Say how much the cache will hold more, and stop before the first step where the disk cannot.

    Raises:
        InputError: says how many bytes are needed.
    """
    tokens = cache.missing_tokens(part.item(i, 0)["input_ids"] for part in samples for i in range(len(part)))
    needed = tokens * feature_codec.token_bytes(width, cache.dtype)
    log_note(f"feature cache: {cache.num_rows:,} rows in {directory}; {needed:,} bytes ({needed / 1e9:,.2f} GB) to go")
    check_disk(directory, needed, "feature_cache", "Pass --feature-cache on another disk, or --feature-dtype fp8.")

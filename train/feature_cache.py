"""`train NAME --features cache`: features are stored when they are first computed, and read from then on.

A row is named by a hash of its token ids, because features depend on these and the target alone: the order of samples,
the number of ranks, splitting, packing and the dataset do not matter. Ranks and runs may share a directory. Computed
features are rounded as stored ones are, so that training sees the same.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.store import feature_codec
from draftsmith.data.store.feature_codec import FeatureDtype, FeatureFiles
from draftsmith.data.store.spool import row_name
from draftsmith.modules.finite import first_broken
from draftsmith.modules.pretrained.files import CannotWrite, is_temporary, make_directory, write_json, write_tensors
from draftsmith.modules.pretrained.provenance import changes
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError

ABOUT = "cache.json"
# In memory twice at most, while one shard is written and the next collected. A killed run computes one again.
SHARD_BYTES = 256 * 2**20
# Seconds between two listings of the directory for rows that other ranks have written.
LOOK_EVERY_S = 1.0
LEFTOVER_S = 3600.0


class FeatureCache:
    """A directory of safetensors shards that only grows; each shard is complete or absent.

    shard_of: row name -> file, of the rows on disk that this process has seen.
    """

    def __init__(self, directory: Path, identity: Mapping[str, Any], dtype: FeatureDtype, model_dtype: str):
        """identity: the target's. model_dtype: in which it computes.

        Raises:
            InputError: the directory holds features of another target or dtype, or is something else.
        """
        self._directory, self.dtype = Path(directory), dtype
        self._begin({"kind": "feature-cache", "target": dict(identity), "dtype": dtype, "model_dtype": model_dtype})
        self._shards: set[str] = set()
        self.shard_of: dict[str, str] = {}
        self._files = FeatureFiles(self._directory)
        # Encoded rows, and the bytes of those that no shard is being written of.
        self._unwritten: dict[str, dict[str, Tensor]] = {}
        self._new_bytes = 0
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[tuple[str, list[str]]] | None = None
        self._full = False
        self._looked = -LOOK_EVERY_S
        self._look()

    @property
    def num_rows(self) -> int:
        """Rows that this process has seen."""
        return len(self.shard_of) + len(self._unwritten)

    def item(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the stored features (`feature_codec.as_item`) of a row with token ids [T], if there are any."""
        name = row_name(input_ids)
        stored = self._unwritten.get(name)
        if stored is None:
            if name not in self.shard_of:
                self._look()
            if name not in self.shard_of:
                return {}
            stored = self._files.read(self.shard_of[name], name, f"row {name}")
        return feature_codec.as_item(stored)

    def put(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """Store the features [T, H] of a row with token ids [T] (on the CPU); return them as they are read, in bf16."""
        encoded = feature_codec.encode(features, self.dtype)
        name = row_name(input_ids)
        known = name in self.shard_of or name in self._unwritten
        if not (self._full or known) and first_broken(features) is None:
            # Copies, because slices would keep the whole batch in memory.
            self._unwritten[name] = {suffix: tensor.to("cpu", copy=True) for suffix, tensor in encoded.items()}
            self._new_bytes += sum(tensor.nbytes for tensor in encoded.values())
            if self._new_bytes >= SHARD_BYTES:
                self.flush(wait=False)
        return feature_codec.decode(encoded)

    def flush(self, wait: bool = True) -> None:
        """Write the stored rows. wait: return when they are on the disk."""
        self._collect()
        if self._unwritten:
            self._new_bytes = 0
            self._writer = self._writer or ThreadPoolExecutor(1)
            self._writing = self._writer.submit(self._write, dict(self._unwritten))
        if wait:
            self._collect()

    def _collect(self) -> None:
        """Wait for the shard that is being written, if any. A full disk ends the caching, not the training."""
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
        self.shard_of |= dict.fromkeys(names, shard)
        for name in names:
            del self._unwritten[name]

    def _write(self, rows: dict[str, dict[str, Tensor]]) -> tuple[str, list[str]]:
        """Write a shard and return its name and those of its rows.

        The name is random, because runs that share the directory do not coordinate.
        """
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
        elif not all(is_temporary(entry.name) for entry in directory.iterdir()):
            # Another rank may have written it meanwhile.
            if not path.exists():
                remedy = "Choose a new one."
                raise InputError("feature_cache", f"{directory}, which holds something else", "a cache", remedy)
        else:
            write_json(path, about)
        # Killed runs leave temporary files; those of a running one are younger.
        for leftover in directory.iterdir():
            if is_temporary(leftover.name) and time.time() - leftover.stat().st_mtime > LEFTOVER_S:
                leftover.unlink(missing_ok=True)

    def _look(self) -> None:
        """Read the names of rows in new shards, whichever process wrote them."""
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        for path in self._directory.glob("*.safetensors"):
            if path.name not in self._shards:
                self.shard_of |= dict.fromkeys(self._files.keys(path.name), path.name)
                self._shards.add(path.name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a reader process, which reads only files."""
        return {**self.__dict__, "_unwritten": {}, "_writer": None, "_writing": None}

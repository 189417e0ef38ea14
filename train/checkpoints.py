"""Checkpoints on disk: whole or not at all, checked by hash, the same under every strategy and number of ranks.

output/checkpoints/step-NNNNNNNN/ holds state.pt, Lightning's checkpoint with whole tensors by parameter, and
manifest.json with its sha256. It is written under a temporary name and renamed. Nothing in training draws from a global
random generator (samples, order and noise are functions of the seed, the epoch and the sample), so the step and the
weights with their optimizer state are all there is to restore.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from draftsmith.data.store.files import CannotWrite, make_directory, publish, write_json
from draftsmith.data.store.manifest import file_sha256
from draftsmith.data.store.reading import read_object
from draftsmith.modules.types import InputError

FOLDER, STATE, MANIFEST = "checkpoints", "state.pt", "manifest.json"
SCHEMA_VERSION = 1
SHAPE = {"schema_version": int, "files": {"*": {"bytes": int, "sha256": str}}}
NAME = re.compile(r"step-(\d{8,})")
# What a reader of a damaged file or manifest may raise.
DAMAGE = (OSError, ValueError, KeyError, TypeError)


class Checkpoints(CheckpointIO):
    """Writes and reads the checkpoints of a run, for Lightning.

    keep: how many of the newest stay. about: what the manifest says besides. accumulate: parts of a step in this run.
    failure: what went wrong in the last save, or nothing; known on the rank that writes.
    """

    def __init__(self, keep: int, about: dict[str, Any], accumulate: int):
        self.keep, self.about, self.accumulate = keep, about, accumulate
        self.failure = ""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """A full disk leaves the earlier checkpoints as they are and is told in `failure`."""
        path = Path(path)
        partial = path.with_name(f"{path.name}.tmp")
        self.failure = ""
        try:
            make_directory(path.parent)
            for rest in path.parent.glob("step-*.tmp*"):  # of a run that was killed while it wrote or deleted
                shutil.rmtree(rest, ignore_errors=True)
            partial.mkdir()
            entry = _write(checkpoint, partial / STATE)
            manifest = {"kind": "checkpoint", "schema_version": SCHEMA_VERSION, "step": checkpoint["global_step"]}
            write_json(partial / MANIFEST, {**manifest, **self.about, "files": {STATE: entry}})
            if path.exists():  # damaged, or the run would have gone on from it
                self.remove_checkpoint(path)
            publish(partial, path)
        except (OSError, CannotWrite) as error:
            self.failure = str(error)
            shutil.rmtree(partial, ignore_errors=True)
            return
        self._prune(path)

    def _prune(self, newest: Path) -> None:
        """Keep the newest ones. What is later than the one just written is damaged: the run went on from an earlier."""
        found = all_in(newest.parent)
        upto = [path for path in found if step_of(path) <= step_of(newest)]
        for path in set(found) - set(upto[-self.keep :]):
            self.remove_checkpoint(path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Tensors and plain values only, nothing that runs (weights_only); on disk until they are copied (mmap)."""
        checkpoint = torch.load(Path(path) / STATE, map_location="cpu", weights_only=True, mmap=True)
        # Lightning counts parts; the run that wrote the checkpoint may have had another number of them in a step.
        parts = checkpoint["global_step"] * self.accumulate
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            # Checkpoints are taken in the callbacks of a step's last part, which is not completed then.
            counts |= {"ready": parts, "started": parts, "processed": parts, "completed": parts - 1}
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Under another name first, so that half of one never looks like a damaged one."""
        gone = Path(path).with_name(f"{Path(path).name}.tmp-gone")
        shutil.rmtree(gone, ignore_errors=True)
        Path(path).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def all_in(folder: Path) -> list[Path]:
    """Checkpoints that were written to their end, oldest first; some may have been damaged since."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def newest_intact(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose content is as it was written; None where there has been none. Each damaged one
    that is passed over is warned of.

    Raises:
        InputError: there are checkpoints, and all are damaged.
    """
    found = all_in(folder)
    for path in reversed(found):
        reason = damage(path)
        if not reason:
            return path
        warn(f"warning: checkpoint {path} is damaged ({reason}) and passed over")
    if found:
        raise InputError(str(folder), "only damaged checkpoints", "an intact one", "Choose another output.")
    return None


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, or nothing."""
    try:
        manifest = read_object(path / MANIFEST, SHAPE)
        if manifest["schema_version"] != SCHEMA_VERSION:
            return f"schema version {manifest['schema_version']}, not {SCHEMA_VERSION}"
        for name, entry in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
            if file_sha256(path / name) != entry["sha256"]:
                return f"{name} has other content than was written"
    except DAMAGE as error:
        return f"{type(error).__name__}: {error}"
    return ""


def step_of(path: Path | None) -> int:
    """Steps done when a checkpoint was taken, by its name; 0 without one."""
    if path is None:
        return 0
    named = NAME.fullmatch(path.name)
    assert named is not None, path
    return int(named[1])


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


class _Hashed:
    """A file that is hashed while it is written. An error is kept for the end: it must not pass through torch's writer,
    which would hide it behind one of its own, or end the process."""

    def __init__(self, file: IO[bytes]):
        self._file, self._hash = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
                self._hash.update(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Done once, at the end."""

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _write(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write and sync; what the manifest says of the file.

    Raises:
        OSError: it does not fit, or cannot be written.
    """
    with path.open("wb") as file:
        hashed = _Hashed(file)
        # A checkpoint is tensors and plain values, and is read back with weights_only. save writes and flushes only.
        torch.save(checkpoint, cast(IO[bytes], hashed))
        if hashed.error is not None:
            raise hashed.error
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": hashed.hexdigest()}

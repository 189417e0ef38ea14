"""Checkpoints: whole or absent, checked by hash, the same under every strategy and number of ranks.

output/checkpoints/step-NNNNNNNN/ holds state.pt, Lightning's checkpoint with whole tensors by parameter, and
manifest.json with its sha256. Training draws nothing from a global random generator (samples, order and noise are
functions of the seed, the epoch and the sample), so a checkpoint is the step, the weights and the optimizer state.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from draftsmith.modules.pretrained.files import CannotWrite, whole_directory, write_json
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError
from draftsmith.train.metrics import BadSteps, Means, rank, say_on_rank_zero
from draftsmith.train.optimizers import TimeLimit

FOLDER, STATE, MANIFEST = "checkpoints", "state.pt", "manifest.json"
SHAPE = {"files": {STATE: {"sha256": str}}}
NAME = re.compile(r"step-(\d{8,})")
# Parts of the state that are plain values.
PLAIN = ("best", "latest", "calibration", "unvalidated", "tau_on")
# Exceptions that reading a damaged file or manifest may raise.
DAMAGE = (OSError, ValueError, KeyError, TypeError)


@dataclass
class TrainState:
    """What a resumed training continues with beside weights and optimizer state.

    means: losses that are yet to be logged. bad_steps: skipped ones. time_limit: plan of a training by the clock. best,
    latest: metrics of the validation of best/, and of the last one. calibration: scale and shift of an acceptance head,
    fitted by the last validation. unvalidated: a signal left no time for the validation after the last step. tau_on:
    digest of the answers that tau was measured along.
    """

    bad_steps: BadSteps
    means: Means = field(default_factory=Means)
    time_limit: TimeLimit | None = None
    best: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    calibration: tuple[float, float] = (1.0, 0.0)
    unvalidated: bool = False
    tau_on: str = ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks together; all of them must call it."""
        plain = {name: getattr(self, name) for name in PLAIN}
        parts = {"means": self.means.state(), "bad_steps": self.bad_steps.state()}
        return plain | parts | ({} if self.time_limit is None else {"time_limit": self.time_limit.state()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if rank() == 0:
            self.means.load(state["means"])
        self.bad_steps.load(state["bad_steps"])
        for name in PLAIN:
            setattr(self, name, state[name])
        if self.time_limit is not None:
            self.time_limit.load(state["time_limit"])


class Checkpoints(TorchCheckpointIO):
    """Checkpoint plugin for Lightning. Paths of other names, as of a user's `ModelCheckpoint`, are Lightning's files.

    keep: newest checkpoints that are kept. about: further entries of the manifest. failure: error of the last save, or
    empty; set on the rank that writes.
    """

    def __init__(self, keep: int, about: dict[str, Any]):
        self.keep, self.about = keep, about
        self.failure = ""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint. On a full disk the earlier ones stay unchanged, and `failure` holds the error."""
        path = Path(path)
        if NAME.fullmatch(path.name) is None:
            return super().save_checkpoint(checkpoint, path, storage_options)
        self.failure = ""
        try:
            # One that is there is damaged, or the run would have resumed from it.
            with whole_directory(path) as partial:
                entry = _write(checkpoint, partial / STATE)
                manifest = {"kind": "checkpoint", "step": checkpoint["global_step"]}
                write_json(partial / MANIFEST, {**manifest, **self.about, "files": {STATE: entry}})
        except (OSError, CannotWrite) as error:
            self.failure = str(error)
            return None
        # A checkpoint later than this one is damaged: the run resumed from an earlier one.
        saved = all_in(path.parent)
        kept = [other for other in saved if step_of(other) <= step_of(path)][-self.keep :]
        for other in set(saved) - set(kept):
            self.remove_checkpoint(other)
        return None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load tensors and plain values only, no code (weights_only), mapped until they are copied."""
        try:
            return torch.load(Path(path) / STATE, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # damaged and hostile bytes make the reader fail in ways it does not list
            found, expected = f"no checkpoint of ours ({type(error).__name__})", "tensors and plain values"
            raise InputError(str(Path(path) / STATE), found, expected, "Choose another output.") from error

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, renamed first so that a half-deleted one never looks like a damaged one."""
        if NAME.fullmatch(Path(path).name) is None:
            return super().remove_checkpoint(path)
        # `newest_intact` clears `step-*.tmp*`.
        gone = Path(path).with_name(f"{Path(path).name}.tmp-gone")
        shutil.rmtree(gone, ignore_errors=True)
        Path(path).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return None


def all_in(folder: Path) -> list[Path]:
    """Return the checkpoints that were written completely, oldest first; some may have been damaged since."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), key=step_of)


def newest_intact(folder: Path) -> Path | None:
    """Return the newest checkpoint whose hash matches, or None without checkpoints. Warn of damaged ones skipped.

    What a killed run left while it wrote or deleted one is removed.

    Raises:
        InputError: there are checkpoints, and all are damaged.
    """
    for rest in (*folder.glob("step-*.tmp*"), *folder.glob(".step-*")) if rank() == 0 else ():
        shutil.rmtree(rest, ignore_errors=True)
    saved = all_in(folder)
    for path in reversed(saved):
        try:
            entry = read_object(path / MANIFEST, SHAPE)["files"][STATE]
            changed = file_sha256(path / STATE) != entry["sha256"]
            reason = f"{STATE} has other content than was written" if changed else ""
        except DAMAGE as error:
            reason = f"{type(error).__name__}: {error}"
        if not reason:
            return path
        say_on_rank_zero(f"warning: checkpoint {path} is damaged ({reason}): skipped")
    if saved:
        raise InputError(str(folder), "only damaged checkpoints", "an intact one", "Choose another output.")
    return None


def step_of(path: Path | None) -> int:
    """Return the step of a checkpoint, from its name; 0 without one."""
    if path is None:
        return 0
    match = NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


class _HashedFile:
    """A file that is hashed while it is written. An OSError is kept for the end: torch's writer would hide it
    behind another error, or end the process."""

    def __init__(self, file: IO[bytes]):
        self._file, self.sha256 = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
                self.sha256.update(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: `_write` flushes once, at the end."""


def _write(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write and sync a file; return its entry in the manifest.

    Raises:
        OSError: it does not fit, or cannot be written.
    """
    with path.open("wb") as file:
        hashed = _HashedFile(file)
        # torch.save writes and flushes only, so that this stands for a file.
        torch.save(checkpoint, cast(IO[bytes], hashed))  # noqa: TID251
        if hashed.error is not None:
            raise hashed.error
        # On disk before the rename makes it visible.
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashed.sha256.hexdigest()}

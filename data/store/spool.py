"""A spool: a directory through which one process hands hidden states of rows to another.

An engine's worker writes safetensors files of many rows each (`SpoolWriter`); a file is whole or absent. A row is named
by a hash of its token ids. Every reader has a folder of its own, takes rows from it, and deletes a file once it has
taken or refused all of its rows (`SpoolReader`), so a spool never holds more than its readers have asked for.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

import numpy as np
from torch import Tensor

from draftsmith.data.store.feature_codec import FeatureFiles
from draftsmith.modules.pretrained.files import make_directory, write_tensors

# Most bytes of a file, and of the rows that wait for one.
FILE_BYTES, WAITING_BYTES = 256 * 2**20, 1024 * 2**20
FOLDER = re.compile(r"[A-Za-z0-9-]{1,64}")


def row_name(input_ids: Sequence[int] | Tensor | np.ndarray) -> str:
    """Return the name of the row with these token ids [T]."""
    return hashlib.blake2b(np.asarray(input_ids, dtype=np.int32).tobytes(), digest_size=16).hexdigest()


class SpoolWriter:
    """Thread that writes rows into the folders of a spool.

    Rows that arrive while a file is being written share the next one: the busier the disk, the more rows a file has.
    """

    def __init__(self, directory: Path, log_error: Callable[[str], None]):
        """log_error: called with what went wrong with a file, whose rows are then missing."""
        self._directory, self._log_error = make_directory(directory), log_error
        self._waiting: list[tuple[str, str, Mapping[str, Tensor], Callable[[], None]]] = []
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._write_files, name="draftsmith-spool", daemon=True).start()

    def has_room(self) -> bool:
        """Check whether another row may be put: the rows that wait are bounded in bytes."""
        return self._waiting_bytes < WAITING_BYTES

    def put(self, folder: str, name: str, stored: Mapping[str, Tensor], ready: Callable[[], None]) -> None:
        """Add a row, as `feature_codec.encode` returns it. ready: waits until its tensors hold their values."""
        assert is_folder(folder), folder
        with self._changed:
            self._waiting.append((folder, name, stored, ready))
            self._waiting_bytes += sum(tensor.nbytes for tensor in stored.values())
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when all rows are written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes)

    def _write_files(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                # The rows of one folder that fit a file.
                folder, size, tensors, waits, left = self._waiting[0][0], 0, dict[str, Tensor](), [], []
                for row in self._waiting:
                    if row[0] == folder and size < FILE_BYTES:
                        tensors |= {row[1] + suffix: tensor for suffix, tensor in row[2].items()}
                        size += sum(tensor.nbytes for tensor in row[2].values())
                        waits.append(row[3])
                    else:
                        left.append(row)
                self._waiting = left
            try:
                for wait in waits:
                    wait()
                write_tensors(make_directory(self._directory / folder) / f"{uuid.uuid4().hex}.safetensors", tensors)
            except Exception as error:
                # The reader requests these rows again, or raises an error of its own.
                self._log_error(f"{len(waits)} rows for {folder} were not written: {error}")
            with self._changed:
                self._waiting_bytes -= size
                self._changed.notify_all()


class SpoolReader:
    """The reader's end of one folder of a spool. It is emptied at the start and deleted at the end."""

    def __init__(self, directory: Path, folder: str):
        self._path = Path(directory) / folder
        self._files = FeatureFiles(self._path)
        # Rows that are to come, and how many times each will be taken; rows that are here, and their files.
        self._expected: Counter[str] = Counter()
        self._file_of: dict[str, str] = {}
        self._rows_of: dict[str, set[str]] = {}
        self.close()
        make_directory(self._path)

    def expect(self, name: str) -> bool:
        """Expect a row once more; return whether it has to be requested."""
        self._expected[name] += 1
        return self._expected[name] == 1

    def arrived(self, name: str) -> bool:
        """Check whether an expected row is here."""
        if name not in self._file_of:
            self._look()
        return name in self._file_of

    def take(self, name: str) -> dict[str, Tensor]:
        """Return a row that has arrived, as `feature_codec.encode` returned it.

        Raises:
            InputError: its file is damaged, or a number is not finite.
        """
        file = self._file_of[name]
        stored = self._files.read(file, name, f"row {name}")
        self._expected[name] -= 1
        if not self._expected[name]:
            del self._expected[name], self._file_of[name]
            self._rows_of[file].discard(name)
            self._drop_if_empty(file)
        return stored

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._path, ignore_errors=True)

    def _look(self) -> None:
        """Read the names of the rows in new files."""
        for path in self._path.glob("*.safetensors"):
            if path.name not in self._rows_of:
                rows = self._files.keys(path.name)
                # A row that was requested twice has one file; the other copy is unexpected.
                wanted = {name for name in rows if name in self._expected and name not in self._file_of}
                self._rows_of[path.name] = wanted
                self._file_of |= dict.fromkeys(wanted, path.name)
                self._drop_if_empty(path.name)

    def _drop_if_empty(self, file: str) -> None:
        if not self._rows_of[file]:
            self._files.close(file)
            with suppress(FileNotFoundError):
                (self._path / file).unlink()
            # Kept as an empty entry: on a network file system a deleted file may still be listed for a while.


def is_folder(name: object) -> TypeGuard[str]:
    """Check that a request's word can name a reader's folder, and no other path."""
    return isinstance(name, str) and FOLDER.fullmatch(name) is not None

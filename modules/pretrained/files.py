"""Write files so that each is there whole or not at all, and report a disk that refuses in one line.

Nothing else in this program opens a file to write. Content goes to a temporary name beside the file, is synced, and is
renamed last. A journal or a log grows by whole lines.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    import pyarrow as pa

RETRY = "Free some space or choose another place, then give the command again."
ABANDONED_S = 3600.0  # since the last write
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
# A file system is never filled to the brim.
SPARE_BYTES = 64 * 2**20
REMEDIES = {
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Choose a place that you may write."),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "Choose another path, or remove what is there."),
}


class CannotWrite(InputError):
    """A write that the operating system refused: a full disk, a quota, a read-only file system, a broken device.

    Nothing half-written is left, and the file that was there before still is.
    """


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on leaving, sync it and rename it to `path`.

    Raises:
        CannotWrite: it does not fit or may not be written; the temporary file is deleted.
    """
    path = Path(path)
    _check_regular(path)
    # Random: another process, of this machine or another, may write the same file.
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{os.urandom(3).hex()}")
    try:
        with writing(path):
            temporary.touch()
            # Else `clear_files` of another machine's rank would take it for a leftover.
            with _locked(temporary):
                yield temporary
                _sync(temporary)
                publish(temporary, path)
    finally:
        with suppress(OSError):
            # The disk's trouble has been reported.
            temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise CannotWrite for what goes wrong with writing to `path` inside."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # Libraries keep the system's number in their text only.
        match = re.search(r"(?:os error|[Ee]rrno) (\d+)", str(error))
        number = getattr(error, "errno", None) or (int(match[1]) if match else None)
        if isinstance(error, SafetensorError) and number is None:
            raise
        reason = os.strerror(number) if number is not None else " ".join(str(error).split())
        expected, remedy = "a place that can be written", REMEDIES.get(number or 0, RETRY)
        raise CannotWrite(str(path), reason, expected, remedy) from error


def check_disk(directory: Path, needed: int, field: str, remedy: str) -> None:
    """Raise InputError if the disk of `directory`, which need not exist yet, cannot hold `needed` bytes."""
    existing = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed and needed + SPARE_BYTES > free:
        found, expected = f"{free:,} bytes free at {existing}", f"{needed + SPARE_BYTES:,} for what is left to write"
        raise InputError(field, found, expected, remedy)


def _check_regular(path: Path) -> None:
    # Renaming a file to /dev/null would replace the device.
    if path.exists() and not path.is_file():
        raise CannotWrite(str(path), "a directory, a pipe or a device", "a file", "Choose another path.")


def _sync(path: Path) -> None:
    # A rename is durable only when the directory is synced too.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Rename a written and synced file or directory, durably."""
    os.replace(temporary, path)
    _sync(path.parent)


def make_directory(path: Path) -> Path:
    """Make the directory and its parents if they are missing, and return it."""
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def cache_folder(name: str) -> Path:
    """Return the folder of this name in the user's cache. It is relative, and not to be used, without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "draftsmith", name)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file; its directory must exist. Half of a surrogate pair, which UTF-8 cannot hold, becomes `?`."""
    with whole(path) as temporary, temporary.open("wb") as file:
        file.write(text.encode("utf-8", errors="replace"))


def write_json(path: Path, content: object, indent: int | None = 1) -> None:
    """Write a JSON file."""
    # UTF-8 cannot hold half of a surrogate pair; only JSON escapes can.
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        text = json.dumps(content, indent=indent)
    write_text(path, text + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file."""
    with whole(path) as temporary:
        # safetensors keeps others from reading its files; a server often runs as somebody else.
        mode = temporary.stat().st_mode
        save_file(dict(tensors), temporary, dict(metadata) if metadata is not None else None)
        temporary.chmod(mode)


def write_table(path: Path, table: pa.Table, **options: object) -> None:
    """Write an Arrow table to a Parquet file. options: of pyarrow's writer."""
    import pyarrow.parquet as pq

    with whole(path) as temporary, temporary.open("wb") as file:
        pq.write_table(table, file, **options)


def copy_file(source: Path, path: Path) -> None:
    """Copy the content of `source`, which may be a link, and its permissions."""
    with whole(path) as temporary:
        shutil.copy(source, temporary)


def link_file(source: Path, path: Path) -> None:
    """Make a symbolic link to a file; where `source` is a link itself, to the file behind it."""
    with writing(path):
        path.symlink_to(source.resolve())


def append(path: Path, text: str) -> None:
    """Append whole lines to a file and sync them.

    Raises:
        CannotWrite: they do not fit; the file keeps its former length.
    """
    _check_regular(path)
    content = text.encode("utf-8")
    # Unbuffered: closing a buffered file would write again what did not fit.
    with writing(path), path.open("ab", buffering=0) as file:
        length, left = file.tell(), memoryview(content)
        try:
            # An unbuffered write may take a part of the bytes only.
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(length)
            raise


def cut(path: Path, length: int) -> None:
    """Shorten a file to its first bytes, to drop a line that a kill tore."""
    with writing(path):
        os.truncate(path, length)


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty temporary directory; on leaving without an error it replaces `directory`.

    What a killed process left of it is removed, or put back if it is what `directory` held.
    """
    directory = Path(directory)
    make_directory(directory.parent)
    _clear_leftovers(directory)
    mark = f"{os.getpid()}-{os.urandom(3).hex()}"
    partial, old = (directory.with_name(f".{directory.name}.{word}-{mark}") for word in ("tmp", "old"))
    make_directory(partial)
    try:
        with _locked(partial):
            yield partial
            with writing(directory), _locked(directory):
                if not _exchange(partial, directory):
                    with suppress(FileNotFoundError):
                        os.replace(directory, old)
                    publish(partial, directory)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _exchange(temporary: Path, path: Path) -> bool:
    """Swap two directories, so that `path` is there at every moment; return False if there is no such, or the system
    cannot: Linux can, on most file systems."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchange and not exchange(AT_FDCWD, os.fsencode(temporary), AT_FDCWD, os.fsencode(path), RENAME_EXCHANGE):
        _sync(path.parent)
        return True
    return False


def _clear_leftovers(directory: Path) -> None:
    """Remove temporary directories of `directory` that no process holds; put an old one back if there is no other."""
    leftover = re.compile(rf"\.{re.escape(directory.name)}\.(tmp|old)-\d+-[0-9a-f]{{6}}")
    for path in sorted(directory.parent.glob(".*")):
        match = leftover.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        with _locked(path) as ours:
            if ours and match[1] == "old" and not directory.exists():
                publish(path, directory)
            elif ours:
                shutil.rmtree(path, ignore_errors=True)


def clear_files(directory: Path) -> None:
    """Remove the temporary files of killed processes from a directory.

    A file that nobody holds is not yet one: its process holds it a moment after it was made, and safetensors replaces
    it by one of its own. It is one if no process of this machine has the number in its name, or after an hour, as are
    safetensors' own (`.tmp` and six letters), which it never holds.
    """
    for path in directory.glob("*.tmp-[0-9]*-" + 6 * "[0-9a-f]"):
        number = int(path.name.rpartition(".tmp-")[2].partition("-")[0])
        with _locked(path) as ours, suppress(OSError):
            if ours and (not _is_running(number) or _is_abandoned(path)):
                path.unlink()
    for path in directory.glob(".tmp??????"):
        with suppress(OSError):
            if _is_abandoned(path):
                path.unlink()


def _is_running(process: int) -> bool:
    """Return whether a process of this machine has this number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _is_abandoned(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > ABANDONED_S


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a file or directory, if it exists, for the block; yield whether no other process holds it."""
    descriptor, held = None, False
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    try:
        yield held
    finally:
        if descriptor is not None:
            os.close(descriptor)

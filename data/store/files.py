"""Write files so that each is there whole or not at all, and report a disk that refuses in one line.

Nothing else in this program opens a file to write (tests/writes_test.py). Content goes to a temporary name beside the
file, is synced, and is renamed last. A journal or a log grows by whole lines.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.modules.types import InputError

RETRY = "Free some space or choose another place, then give the command again."
# A file system is never filled to the brim.
SPARE_BYTES = 64 * 2**20
REMEDIES = {
    errno.EROFS: "Choose a place that can be written.",
    errno.EACCES: "Choose a place that you may write.",
    errno.EPERM: "Choose a place that you may write.",
    errno.EISDIR: "Name a file.",
    errno.EEXIST: "Choose another path, or remove what is there.",
    errno.ENOTDIR: "Choose another path, or remove what is there.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.EIO: "Check the disk, or choose another place; then give the command again.",
}
# Reading a pipe without a writer never returns, /dev/zero has no end, and an atomic write turns a
# device into a regular file.
SPECIAL_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# Settings that are texts and name no file.
NO_PATHS = ("command", "prompt")


class CannotWrite(InputError):
    """A write that the operating system refused: a full disk, a quota, a read-only file system, a broken device.

    Nothing half-written is left, and the file that was there before still is.
    """


@contextmanager
def whole(path: Path, needed: int | None = None, remedy: str | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on leaving, sync it and rename it to `path`.

    needed: bytes, if they are known before. remedy: for the error, instead of the usual one.

    Raises:
        CannotWrite: it does not fit or may not be written; the temporary file is deleted.
    """
    path = Path(path)
    _check_regular(path)
    # Random: another process, of this machine or another, may write the same file.
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{os.urandom(3).hex()}")
    try:
        with writing(path, needed, remedy):
            yield temporary
            _sync(temporary)
            publish(temporary, path)
    finally:
        with suppress(OSError):
            # The disk's trouble has been reported.
            temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, needed: int | None = None, remedy: str | None = None) -> Iterator[None]:
    """Raise CannotWrite for what goes wrong with writing to `path` inside.

    The error names the file, what the system says, the free space and the space needed.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # Libraries keep the system's number in their text only.
        match = re.search(r"(?:os error|[Ee]rrno) (\d+)", str(error))
        number = getattr(error, "errno", None) or (int(match[1]) if match else None)
        if isinstance(error, SafetensorError) and number is None:
            raise
        # A library may raise without a number of the system: report its own text then.
        reason = os.strerror(number) if number is not None else " ".join(str(error).split())
        if number in REMEDIES:
            raise CannotWrite(str(path), reason, "a place that can be written", REMEDIES[number]) from error
        try:
            free = f"{shutil.disk_usage(_existing(Path(path).parent)).free / 1e6:,.1f} MB free"
        except OSError:
            free = ""
        # It may not fit: say how much room there is, and how much is needed.
        facts = [reason, free, f"{needed / 1e6:,.1f} MB needed" if needed else ""]
        raise CannotWrite(str(path), "; ".join(filter(None, facts)), "room to write it", remedy or RETRY) from error


def check_disk(directory: Path, needed: int, field: str, remedy: str) -> None:
    """Raise InputError if the disk of `directory`, which need not exist yet, cannot hold `needed` bytes."""
    existing = _existing(directory)
    free = shutil.disk_usage(existing).free
    if needed and needed + SPARE_BYTES > free:
        found, expected = f"{free:,} bytes free at {existing}", f"{needed + SPARE_BYTES:,} for what is left to write"
        raise InputError(field, found, expected, remedy)


def special_kind(path: str | Path) -> str | None:
    """Return the kind of a special file; None for a regular file, a directory, or nothing."""
    try:
        return SPECIAL_KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except (OSError, ValueError):
        # Not there, or a text that is no path.
        return None


def check_paths(config: Any) -> None:
    """Raise InputError for a pipe, a socket or a device among a command's paths or in its directories."""
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        values = value if isinstance(value, tuple | list) else (value,)
        for path in (path for path in values if isinstance(path, str | Path) and spec.name not in NO_PATHS):
            paths: list[str | Path] = [path]
            # Files and folders are told apart by the listing, without a stat of each.
            with suppress(OSError, ValueError), os.scandir(path) as entries:
                paths += [entry.path for entry in entries if not (entry.is_file() or entry.is_dir())]
            for file in paths:
                if kind := special_kind(file):
                    remedy = "Name a regular file; write what a pipe holds to one first."
                    raise InputError(spec.name, f"{kind} at {file}", "a file or directory", remedy)


def _check_regular(path: Path) -> None:
    if kind := special_kind(path):
        raise CannotWrite(str(path), kind, "a file", "Choose another path.")


def _existing(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


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


def user_cache(name: str) -> Path | None:
    """Return `draftsmith/NAME` in the user's cache directory, which may not exist; None if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "draftsmith" / name


def write_bytes(path: Path, content: bytes, remedy: str | None = None) -> None:
    """Write a file; its directory must exist."""
    with whole(path, len(content), remedy) as temporary, temporary.open("wb") as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file. Half of a surrogate pair, which UTF-8 cannot hold, becomes `?`."""
    write_bytes(path, text.encode("utf-8", errors="replace"))


def write_json(path: Path, content: object, indent: int = 1) -> None:
    """Write a JSON file."""
    # UTF-8 cannot hold half of a surrogate pair; only JSON escapes can.
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        text = json.dumps(content, indent=indent)
    write_text(path, text + "\n")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, remedy: str | None = None
) -> None:
    """Write a safetensors file."""
    needed = sum(tensor.nbytes for tensor in tensors.values())
    with whole(path, needed, remedy) as temporary:
        save_file(dict(tensors), temporary, dict(metadata) if metadata is not None else None)


def write_torch(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write plain tensors in torch's own format, which `torch.load(weights_only=True)` reads."""
    # Into memory first: torch's writer ends the process if a disk refuses it.
    file = io.BytesIO()
    torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    write_bytes(path, file.getvalue())


def write_table(path: Path, table: Any, remedy: str | None = None, **options: Any) -> None:
    """Write an Arrow table to a Parquet file. options: of pyarrow's writer."""
    import pyarrow.parquet as pq

    with whole(path, remedy=remedy) as temporary, temporary.open("wb") as file:
        pq.write_table(table, file, **options)


def write_batches(path: Path, batches: Iterable[Any]) -> None:
    """Write record batches of one schema, at least one, to an Arrow file that can be mapped."""
    import pyarrow as pa

    remaining = iter(batches)
    first = next(remaining)
    with whole(path) as temporary, temporary.open("wb") as file, pa.ipc.new_file(file, first.schema) as writer:
        for batch in itertools.chain([first], remaining):
            writer.write_batch(batch)


def copy_file(source: Path, path: Path) -> None:
    """Copy the content of `source`, which may be a link, and its permissions."""
    with whole(path, Path(source).stat().st_size) as temporary:
        shutil.copy(source, temporary)


def append(path: Path, text: str) -> None:
    """Append whole lines to a file and sync them.

    Raises:
        CannotWrite: they do not fit; the file keeps its former length.
    """
    _check_regular(path)
    content = text.encode("utf-8")
    with writing(path, len(content)), path.open("ab", buffering=0) as file:
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
    """Yield an empty temporary directory; on leaving without an error it replaces `directory`."""
    directory = Path(directory)
    partial = directory.with_name(directory.name + ".tmp")
    old = directory.with_name(directory.name + ".old")
    # Left by a killed run.
    shutil.rmtree(partial, ignore_errors=True)
    make_directory(partial)
    try:
        yield partial
        with writing(directory):
            if directory.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(directory, old)
            publish(partial, directory)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

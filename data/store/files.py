"""How everything is written: a file is there whole or not at all, and a disk that refuses it is one line for the user.

Nothing else in this program opens a file to write (tests/architecture_test.py): what is written goes to a name of its
own beside the file, is synced, and takes the file's name last. A journal or a log grows by whole lines.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.data.store.special import special_kind
from draftsmith.modules.types import InputError

AGAIN = "Free some space or choose another place, then give the command again."
SPARE_BYTES = 64 * 2**20  # a file system is never filled to the brim
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


class CannotWrite(InputError):
    """The operating system refuses to write: a full disk, a quota, a read-only file system, a broken device. Nothing
    half-written is left, and what was there before still is."""


@contextmanager
def whole(path: Path, needed: int | None = None, remedy: str | None = None) -> Iterator[Path]:
    """Yields a temporary path beside `path` to write a file to; on leaving, it is synced and takes the name.

    needed: bytes, where they are known before. remedy: in the place of the usual one.

    Raises:
        CannotWrite: it does not fit or may not be written; the temporary file is gone then.
    """
    path = Path(path)
    _check_regular(path)
    # Other processes, of this machine or another, may write the same file.
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{os.urandom(3).hex()}")
    try:
        with writing(path, needed, remedy):
            yield temporary
            _sync(temporary)
            publish(temporary, path)
    finally:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:  # the same trouble, which has been told
            pass


@contextmanager
def writing(path: Path, needed: int | None = None, remedy: str | None = None) -> Iterator[None]:
    """What goes wrong with writing to `path` inside, as one line for the user.

    Raises:
        CannotWrite: in the place of an OSError, and of the errors in which libraries wrap one.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and number_of(error) is None:
            raise
        raise cannot_write(path, error, needed, remedy) from error


def number_of(error: BaseException) -> int | None:
    """The operating system's number of an error, also where a library keeps it in its text only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"(?:os error|[Ee]rrno) (\d+)", str(error))
    return int(found[1]) if found else None


def cannot_write(path: Path, error: BaseException, needed: int | None = None, remedy: str | None = None) -> CannotWrite:
    """The line that names the file, what the system says, and how much room there is and would be needed."""
    number = number_of(error)
    said = os.strerror(number) if number is not None else " ".join(str(error).split())
    try:
        free = f"{shutil.disk_usage(_existing(Path(path).parent)).free / 1e6:,.1f} MB free"
    except OSError:
        free = ""
    if number in REMEDIES:
        return CannotWrite(str(path), said, "a place that can be written", REMEDIES[number])
    about = [said, free, f"{needed / 1e6:,.1f} MB needed" if needed else ""]
    return CannotWrite(str(path), "; ".join(filter(None, about)), "room to write it", remedy or AGAIN)


def check_disk(directory: Path, needed: int, field: str, remedy: str) -> None:
    """Raises InputError where the disk of `directory`, which need not be there yet, cannot hold `needed` bytes."""
    existing = _existing(directory)
    free = shutil.disk_usage(existing).free
    if needed and needed + SPARE_BYTES > free:
        found, expected = f"{free:,} bytes free at {existing}", f"{needed + SPARE_BYTES:,} for what is left to write"
        raise InputError(field, found, expected, remedy)


def _check_regular(path: Path) -> None:
    """Raise CannotWrite for a device, pipe or socket: taking its name would put a file in its place."""
    if kind := special_kind(path):
        raise CannotWrite(str(path), kind, "a file", "Choose another path.")


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Give a written and synced file, or directory, its name, durably."""
    os.replace(temporary, path)
    _sync(path.parent)


def make_directory(path: Path) -> Path:
    """The directory, made with those above it where they are not there.

    Raises:
        CannotWrite: a file is in the way, or it may not be made.
    """
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def user_cache(name: str) -> Path | None:
    """`draftsmith/NAME` in the user's cache directory, which may not exist yet; None if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "draftsmith" / name


def write_bytes(path: Path, content: bytes, remedy: str | None = None) -> None:
    """A file of this content; its directory has to be there."""
    with whole(path, len(content), remedy) as temporary, temporary.open("wb") as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """A file of this text in UTF-8. Half of a surrogate pair, which no text may hold, is written as `?`."""
    write_bytes(path, text.encode("utf-8", errors="replace"))


def write_json(path: Path, content: object, indent: int = 1) -> None:
    """A file of JSON; what only JSON's escapes can say (half of a surrogate pair) is escaped."""
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        text = json.dumps(content, indent=indent)
    write_text(path, text + "\n")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, remedy: str | None = None
) -> None:
    """A safetensors file."""
    needed = sum(tensor.nbytes for tensor in tensors.values())
    with whole(path, needed, remedy) as temporary:
        save_file(dict(tensors), temporary, dict(metadata) if metadata is not None else None)


def write_torch(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file of torch's own format that holds plain tensors: what loads it needs no more than `weights_only`."""
    file = io.BytesIO()  # torch's writer ends the process where a disk refuses it
    torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    write_bytes(path, file.getvalue())


def write_table(path: Path, table: Any, remedy: str | None = None, **options: Any) -> None:
    """A Parquet file of an Arrow table. options: of pyarrow's writer."""
    import pyarrow.parquet as pq

    with whole(path, remedy=remedy) as temporary, temporary.open("wb") as file:
        pq.write_table(table, file, **options)


def write_batches(path: Path, batches: Iterable[Any]) -> None:
    """An Arrow file, which can be mapped, of one record batch or more of one schema, each written as it comes."""
    import pyarrow as pa

    coming = iter(batches)
    first = next(coming)
    with whole(path) as temporary, temporary.open("wb") as file, pa.ipc.new_file(file, first.schema) as writer:
        for batch in itertools.chain([first], coming):
            writer.write_batch(batch)


def copy_file(source: Path, path: Path) -> None:
    """The content of `source`, which may be a link, and its permissions."""
    with whole(path, Path(source).stat().st_size) as temporary:
        shutil.copy(source, temporary)


def append(path: Path, text: str) -> None:
    """Add whole lines to a file; they are on the disk when this returns.

    Raises:
        CannotWrite: they do not fit; the file is then as long as it was.
    """
    _check_regular(path)
    content = text.encode("utf-8")
    with writing(path, len(content)), path.open("ab", buffering=0) as file:
        length, left = file.tell(), memoryview(content)
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(length)
            raise


def cut(path: Path, length: int) -> None:
    """Shorten a file to its first bytes: what follows is a line that a kill tore."""
    with writing(path):
        os.truncate(path, length)


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Yields an empty temporary directory beside `directory`; on leaving without an error it takes the name, and an
    older one of that name is deleted."""
    directory = Path(directory)
    partial = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed run
    make_directory(partial)
    try:
        yield partial
        _replace_directory(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace_directory(partial: Path, directory: Path) -> None:
    old = directory.with_name(directory.name + ".old")
    with writing(directory):
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(directory, old)
        publish(partial, directory)
    shutil.rmtree(old, ignore_errors=True)

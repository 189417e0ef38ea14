"""Content hashes of a checkpoint's tensors, remembered for as long as its files stay as they are.

A hash is of the values in bfloat16: the same weights have the same hash in other shards, under another file's name, and
stored in another floating-point type. (Two float32 checkpoints share one only where every weight of both rounds to the
same bfloat16 number.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.console import log_note
from draftsmith.data.store.files import CannotWrite, make_directory, user_cache, write_json
from draftsmith.data.store.reading import open_tensors

VERSION = 1  # of what a remembered file means
THREADS = 4  # each reads and hashes a tensor at a time, about a gigabyte a second
SAID_FROM = 4e9  # bytes that take long enough to say so
# A file that was written less than this before it was read may be written again without its time showing it.
SETTLED_NS = 2_000_000_000
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class TensorDigest:
    """kind: `float`, or another dtype's name. sha256: of the values' bytes, floats in bfloat16."""

    shape: tuple[int, ...]
    kind: str
    sha256: str


def tensor_digests(files: Iterable[Path]) -> dict[str, TensorDigest]:
    """Digests by name of all tensors in safetensors files: remembered ones, or read and then remembered.

    Raises:
        InputError: a damaged file.
    """
    found: dict[str, TensorDigest] = {}
    known = {file: _remembered(file) for file in files}
    missing = sum(file.stat().st_size for file, digests in known.items() if digests is None)
    if missing > SAID_FROM:
        log_note(f"draftsmith: hashing {missing / 1e9:.0f} GB of weights, once")
    for file, digests in known.items():
        found |= _read_and_remember(file) if digests is None else digests
    return found


def weights_hash(digests: dict[str, TensorDigest]) -> str:
    """Hash of a whole checkpoint. An output embedding that equals another tensor is not counted: files of a model that
    ties them may have it or not."""
    by_name = {_bare_name(name): digest for name, digest in digests.items() if not name.endswith("rotary_emb.inv_freq")}
    others = {digest for name, digest in by_name.items() if not _is_output(name)}
    kept = {name: digest for name, digest in by_name.items() if not (_is_output(name) and digest in others)}
    listed = [[name, digest.shape, digest.kind, digest.sha256] for name, digest in sorted(kept.items())]
    return _sha256(listed)[:16]


def output_hash(digests: dict[str, TensorDigest], names: Iterable[str]) -> str | None:
    """Hash of the first of these tensors that the files have, as `tensor_hash` gives it."""
    by_name = {_bare_name(name): digest for name, digest in digests.items()}
    return next((by_name[_bare_name(name)].sha256[:16] for name in names if _bare_name(name) in by_name), None)


def tensor_hash(tensor: torch.Tensor) -> str:
    """Content hash of a tensor's values in bf16, so that it does not depend on the dtype it was loaded in."""
    return hashlib.sha256(_bytes(tensor.detach().to("cpu"), "float")).hexdigest()[:16]


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _bare_name(name: str) -> str:
    """Base models are saved with the prefix of their place in the whole, or without."""
    return name.removeprefix("model.").removeprefix("transformer.")


def _is_output(name: str) -> bool:
    return name.endswith(("lm_head.weight", "embed_out.weight"))


def _read_and_remember(file: Path) -> dict[str, TensorDigest]:
    before = _stamp(file)
    digests = _read(file)
    settled = time.time_ns() - before["mtime_ns"] > SETTLED_NS
    if settled and _stamp(file) == before:
        _remember(file, before, digests)
    return digests


def _read(file: Path) -> dict[str, TensorDigest]:
    with open_tensors(file, "Fetch or build it again.") as opened, ThreadPoolExecutor(THREADS) as pool:
        names = list(opened.keys())
        return dict(zip(names, pool.map(lambda name: _digest(opened, name), names), strict=True))


def _digest(opened: Any, name: str) -> TensorDigest:
    tensor = opened.get_tensor(name)
    kind = "float" if tensor.dtype in FLOATS else str(tensor.dtype)
    return TensorDigest(tuple(tensor.shape), kind, hashlib.sha256(_bytes(tensor, kind)).hexdigest())


def _bytes(tensor: torch.Tensor, kind: str) -> Any:
    values = tensor.to(torch.bfloat16) if kind == "float" else tensor
    return values.contiguous().reshape(-1).view(torch.uint8).numpy()


def _entry(file: Path) -> Path | None:
    """The hub's cache links one content from several places: what counts is the file behind the links."""
    place = user_cache("digests")
    return None if place is None else place / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"


def _stamp(file: Path) -> dict[str, int]:
    # The time of the last change cannot be set back, as that of the last writing can: cp -p, rsync -t.
    about = file.stat()
    return {
        "version": VERSION,
        "size": about.st_size,
        "mtime_ns": about.st_mtime_ns,
        "ctime_ns": about.st_ctime_ns,
        "inode": about.st_ino,
    }


def _remembered(file: Path) -> dict[str, TensorDigest] | None:
    """None where nothing is known of the file as it is now; what cannot be read is not known."""
    entry = _entry(file)
    try:
        content = json.loads(entry.read_text("utf-8")) if entry is not None else {}
        tensors = content["tensors"]
        if content["stamp"] != _stamp(file) or content["sha256"] != _sha256(tensors):
            return None
        return {n: TensorDigest(tuple(shape), kind, sha) for n, (shape, kind, sha) in tensors.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _remember(file: Path, stamp: dict[str, int], digests: dict[str, TensorDigest]) -> None:
    entry = _entry(file)
    if entry is None:
        return
    tensors = {name: [list(digest.shape), digest.kind, digest.sha256] for name, digest in digests.items()}
    content = {"file": str(file.resolve()), "stamp": stamp, "tensors": tensors, "sha256": _sha256(tensors)}
    with contextlib.suppress(CannotWrite):  # a read-only or full disk: hashed again the next time
        make_directory(entry.parent)
        write_json(entry, content)

"""What every artefact directory says about itself, and how it is opened.

A stage writes `started.json` first and `manifest.json` last, both atomically: a directory with a manifest is complete,
one without it is unfinished, and an unfinished one says which command continues it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import shlex
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.console import log_note
from draftsmith.data.ranks import place
from draftsmith.data.store.files import write_json
from draftsmith.data.store.reading import check_shape, read_object
from draftsmith.modules.drafters import learned
from draftsmith.modules.types import InputError

SCHEMA_VERSION = 1
MANIFEST, STARTED = "manifest.json", "started.json"
ROOT = Path(__file__).resolve().parents[2]  # of the package, and of the checkout where it runs from one
# Hashes that earlier versions did not record.
LATER = ("weights", "tokenizer", "encoding", "code")
PACKAGES = ("draftsmith", "torch", "transformers", "tokenizers", "datasets", "safetensors", "pyarrow", "numpy")


# Of the files as they are on the disk (data/store/reading.py).
FILE: dict[str, Any] = {"name": str, "bytes": int, "sha256": str, "rows": int}
SHAPE: dict[str, Any] = {
    "kind": str,
    "config?": dict,
    "inputs?": {"*": str},
    "identity?": dict,
    "sampling?": (dict, None),
    "fields": [{"name": str, "dtype": str, "shape": [str]}],
    "counts?": {"*": int},
    "files": [FILE],
    "seed?": (int, None),
    "command?": str,
    "packages?": {"*": (str, None)},
    "git_commit?": (str, None),
}


@dataclass(frozen=True)
class Field:
    """A column or tensor: its dtype as Arrow or torch writes it, and its symbolic shape (R response positions)."""

    name: str
    dtype: str
    shape: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileEntry:
    """One file of the artefact. `rows`: how many of the artefact's rows it holds."""

    name: str
    bytes: int
    sha256: str
    rows: int

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> FileEntry:
        """Of the object that a file has of it."""
        return cls(**{name: raw[name] for name in FILE})


@dataclass(frozen=True)
class Manifest:
    """The provenance of an artefact.

    config: the resolved configuration of the stage. inputs: name -> `digest` of the manifest or file it was made from.
    identity: nested hashes of target, draft, tokenizer and chat template; what `open_artefact` compares.
    sampling: temperature (a list where labels are of several), top_k, top_p that labels or tokens were drawn with; None
        where nothing was drawn.
    counts: rows, tokens and whatever else the stage counts. command: the command line that makes it again.
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] | None = None
    fields: tuple[Field, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()
    seed: int | None = None
    command: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)
    git_commit: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def digest(self) -> str:
        """Hash of what the artefact holds and what it was made from; not of where, by which commit or release."""
        content = dataclasses.asdict(self)
        for incidental in ("config", "command", "packages", "git_commit"):
            del content[incidental]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        """Write `manifest.json`: the artefact is complete from here on."""
        write_json(Path(directory) / MANIFEST, dataclasses.asdict(self))

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The manifest of a complete artefact.

        Raises:
            InputError: no such directory, an unfinished stage (with the command that continues it), a damaged manifest.
        """
        directory = Path(directory)
        path = directory / MANIFEST
        if not path.exists():
            raise _missing(directory)
        remedy = "Delete this file and run the stage again: it keeps the shards."
        raw = read_object(path, {"schema_version": int, "command?": str}, remedy)
        if raw["schema_version"] != SCHEMA_VERSION:
            found = f"schema version {raw['schema_version']}"
            raise InputError(str(path), found, f"version {SCHEMA_VERSION}", f"Make it again: {raw.get('command')}")
        check_shape(path, raw, SHAPE, remedy)
        if unknown := sorted(raw.keys() - {spec.name for spec in dataclasses.fields(Manifest)}):
            raise InputError(str(path), f"damaged (unknown: {unknown[0]})", "a manifest of this program", remedy)
        raw["fields"] = tuple(Field(f["name"], f["dtype"], tuple(f["shape"])) for f in raw["fields"])
        raw["files"] = tuple(map(FileEntry.of, raw["files"]))
        return Manifest(**{spec.name: raw[spec.name] for spec in dataclasses.fields(Manifest) if spec.name in raw})


def _missing(directory: Path) -> InputError:
    if not directory.is_dir():
        return InputError(str(directory), "no such directory", "an artefact's directory", "Check the path.")
    started = directory / STARTED
    if started.exists():
        command = read_object(started, {"command": str})["command"]
        return InputError(str(directory), "an unfinished stage", "a complete one", f"Continue it: {command}")
    return InputError(str(directory), f"no {MANIFEST}", "an artefact's directory", "Check the path.")


def open_artefact(
    directory: Path,
    kind: str | tuple[str, ...] | None = None,
    identity: Mapping[str, Any] | None = None,
    check: str = "sha256",
) -> Manifest:
    """The manifest of an artefact that is complete, of this kind, intact, and made with these models.

    identity: nested hashes, compared with the artefact's. A single hash that the artefact lacks was unknown to its
        stage (the weights of a model behind a server; an earlier version), which a warning says; a whole missing model
        differs.
    check: what proves a file intact: `sha256` reads all of it; `size` does not, for terabytes of features.

    Raises:
        InputError: one error that lists every differing key and the command that makes the artefact again; or the first
            missing, truncated or altered file.
    """
    manifest = Manifest.read(directory)
    kinds = (kind,) if isinstance(kind, str) else kind
    if kinds is not None and manifest.kind not in kinds:
        found = f"an artefact of kind {manifest.kind}"
        raise InputError(str(directory), found, f"kind {' or '.join(kinds)}", "Pass another directory.")
    differing, unrecorded = compare_identity(identity or {}, manifest.identity)
    if differing:
        found = "made with another " + "; ".join(f"{k}: {theirs} here, {ours} given" for k, ours, theirs in differing)
        remedy = f"Make it again: {manifest.command} (with the models given here, and another output)"
        raise InputError(str(directory), found, "the same identity", remedy)
    warn_not_compared(str(directory), unrecorded)
    for entry in manifest.files:
        check_file(Path(directory), entry, manifest.command, check)
    return manifest


def compare_identity(
    given: Mapping[str, Any], recorded: Mapping[str, Any]
) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """(key, given, recorded) of what differs, and the keys that were not recorded, which nobody can compare.

    given: nested hashes. What is recorded of models that are not given does not count; a model that is given and of
    which nothing is recorded differs, and so does one with a trained drafter from one without.
    """
    ours, theirs = flatten(given), flatten(recorded)
    for key in [key for key in theirs if _is_drafter(key) and key.split(".")[0] in given]:
        ours.setdefault(key, None)
    unrecorded = [
        key
        for key in ours.keys() - theirs.keys()
        if not _is_drafter(key) and (key.split(".")[0] in recorded or key in LATER)
    ]
    compared = {key: value for key, value in ours.items() if key not in unrecorded}
    return differences(compared, {key: theirs.get(key) for key in compared}), sorted(unrecorded)


def _is_drafter(key: str) -> bool:
    """The hash of a trained drafter, which stands beside those of the model that it drafts for."""
    return key.split(".")[-1] in learned()


def without_unrecorded(differing: Iterable[tuple[str, Any, Any]]) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """Those of `differences` that count, and the keys of hashes that one side lacks because an earlier version did not
    take them."""
    listed = list(differing)
    lacking = [key for key, one, other in listed if key.split(".")[-1] in LATER and None in (one, other)]
    return [entry for entry in listed if entry[0] not in lacking], lacking


def changes(where: Path, now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """What differs in nested settings, `seed: 0, now 1; ...`; empty where nothing does. Hashes that an earlier version
    did not take are told and do not count. where: the file that has the settings of before."""
    differing, unrecorded = without_unrecorded(differences(flatten(now), flatten(before)))
    warn_not_compared(str(where), unrecorded)
    return "; ".join(f"{key}: {was}, now {is_now}" for key, is_now, was in differing)


def warn_not_compared(where: str, keys: Sequence[str]) -> None:
    """Say once what of an identity could not be compared."""
    if keys and where not in _warned and place().rank == 0:
        _warned.add(where)
        found = f"{where} does not record {', '.join(keys)} (an earlier version or a server made it)"
        log_note(f"draftsmith: warning: {found}: not compared")


_warned: set[str] = set()


def check_file(directory: Path, entry: FileEntry, command: str, check: str = "sha256") -> None:
    """Raises:
    InputError: the file is missing, has another size, or (check="sha256") other content.
    """
    assert check in ("sha256", "size")
    path = directory / entry.name
    remedy = f"Delete it and run the stage again, which rebuilds just this shard: {command}"
    if not path.exists():
        remedy = f"Run the stage again, which rebuilds just this shard: {command}"
        raise InputError(str(path), "no file", f"{entry.bytes} bytes", remedy)
    size = path.stat().st_size
    if size != entry.bytes:
        raise InputError(str(path), f"{size} bytes", f"{entry.bytes} bytes", remedy)
    if check == "sha256" and (found := file_sha256(path)) != entry.sha256:
        raise InputError(str(path), f"sha256 {found[:12]}", f"sha256 {entry.sha256[:12]}", remedy)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"target": {"config": 1}} -> {"target.config": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ or that one side lacks, as (key, left, right)."""
    keys = left.keys() | right.keys()
    return [(k, left.get(k), right.get(k)) for k in sorted(keys) if left.get(k) != right.get(k)]


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages that an artefact's content may depend on; None where one is not installed. Of
    this program, where it runs from a checkout that nobody has installed, what its pyproject.toml says."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return source_version() if name == "draftsmith" else None

    return {name: version(name) for name in PACKAGES}


def source_version() -> str | None:
    """The version of the checkout this package runs from; None where it is not one."""
    project = ROOT / "pyproject.toml"
    if not project.exists():
        return None
    return f"{tomllib.loads(project.read_text('utf-8'))['project']['version']} (source tree)"


def git_commit() -> str | None:
    """The commit of the checkout this package runs from; None where it is not one."""
    if not (ROOT / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def resolved(config: Any) -> dict[str, Any]:
    """A stage's configuration dataclass as JSON values; paths become strings."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def volatile(default: Any = dataclasses.MISSING, **kwargs: Any) -> Any:
    """A configuration field that does not change what is written (paths, whose content is compared by hash; devices,
    threads, time-outs): a stage may be continued with another value."""
    if default is not dataclasses.MISSING:
        kwargs["default"] = default
    return dataclasses.field(metadata={"volatile": True}, **kwargs)


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Dotted names, fields and values of a configuration and those inside of it; settings that it shares come last."""
    for spec in sorted(dataclasses.fields(config), key=lambda field: bool(field.kw_only)):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{prefix}{spec.name}.")
        else:
            yield prefix + spec.name, spec, value


def decisive(config: Any) -> dict[str, Any]:
    """The fields of a configuration that decide what is written: all but the volatile ones, nested ones dotted."""
    kept = {name: value for name, spec, value in _settings(config) if not spec.metadata.get("volatile")}
    return json.loads(json.dumps(kept, default=str))


def command_line(stage: str, config: Any) -> str:
    """`draftsmith STAGE --field value ...` with the fields that differ from their defaults."""
    words = ["draftsmith", *stage.split()]
    for name, spec, value in _settings(config):
        if value != spec.default:
            as_json = isinstance(value, bool | list | tuple | dict | None)
            plain = json.dumps(value, default=str) if as_json else str(value)
            words += [f"--{name}".replace("_", "-"), plain]
    return shlex.join(words)

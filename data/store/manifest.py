"""Manifest of an artifact directory, and how an artifact is opened.

A stage writes `started.json` first and `manifest.json` last, both atomically. A directory with a manifest is complete;
an unfinished one names the command that continues it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.store.parts import Part
from draftsmith.modules.pretrained.files import write_json
from draftsmith.modules.pretrained.provenance import compare_identity, file_sha256, flatten
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.targets.proof import Proof
from draftsmith.modules.targets.readout import Readout, behind_norm
from draftsmith.modules.types import InputError

SCHEMA_VERSION = 1
MANIFEST, STARTED = "manifest.json", "started.json"
FILE_SHAPE: dict[str, Any] = {"name": str, "bytes": int, "sha256": str, "rows": int}
MANIFEST_SHAPE: dict[str, Any] = {
    "schema_version": int,
    "kind": str,
    "config": dict,
    "inputs": {"*": str},
    "identity": dict,
    "sampling": ({"temperature": (float, [float]), "top_k": int, "top_p": float}, None),
    "fields": [{"name": str, "dtype": str, "shape": [str]}],
    "counts": {"*": int},
    "files": [FILE_SHAPE],
    "seed": (int, None),
    "command": str,
    "packages": {"*": str},
    "git_commit": (str, None),
    "teacher": (dict, None),
}


@dataclass(frozen=True)
class Field:
    """A column or tensor: its dtype as Arrow or torch writes it, and its symbolic shape (R response positions)."""

    name: str
    dtype: str
    shape: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileEntry:
    """One file of an artifact, with how many of the artifact's rows it holds."""

    name: str
    bytes: int
    sha256: str
    rows: int


# What the identity of prompts says; whatever is made of them has the same.
TEXT_KEYS = {"tokenizer", "encoding", "chat_template", "own_template"}


@dataclass(frozen=True)
class Manifest:
    """Provenance of an artifact.

    config: resolved configuration of the stage. inputs: name -> `digest` of the manifest or file that it was made of.
    identity: nested hashes of target, draft, tokenizer and chat template, which `open_artifact` compares.
    sampling: temperature, top_k and top_p that labels or tokens were drawn with; None if
        nothing was drawn.
    counts: rows, tokens and whatever else the stage counts. command: the command line that makes it again.
    teacher: how states were proved against the target's own logits (`targets.proof.Proof.as_json`); None if not.
    directory: from which it was read, without links: one that changes does not change what is read. Not stored.
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
    packages: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    teacher: dict[str, Any] | None = None
    schema_version: int = SCHEMA_VERSION
    directory: Path = field(default=Path(), compare=False)

    @property
    def digest(self) -> str:
        """Hash of the content and the inputs, but not of the place, commit or release that made it."""
        content = self._stored()
        for incidental in ("config", "command", "packages", "git_commit", "teacher"):
            del content[incidental]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def readout(self) -> Readout | None:
        """Steps from the stored states to logits; None if they were not proved."""
        return None if self.teacher is None else behind_norm(Proof.from_json(self.teacher).readout)

    @property
    def field_names(self) -> set[str]:
        return {spec.name for spec in self.fields}

    def write(self, directory: Path) -> None:
        """Write `manifest.json`, which completes the artifact."""
        write_json(Path(directory) / MANIFEST, self._stored())

    def _stored(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "directory"}

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Read the manifest of a complete artifact.

        Raises:
            InputError: no such directory, an unfinished stage (with the command that continues it), a damaged manifest.
        """
        directory = Path(directory)
        opened = directory.resolve()
        path, started = opened / MANIFEST, opened / STARTED
        is_model = (opened / "config.json").exists()
        if not path.exists() or is_model:
            found, expected, remedy = f"no {MANIFEST}", "an artifact's directory", "Check the path."
            if is_model:
                found = "a model or a head"
            elif directory.is_file():
                found, remedy = "a file", f"Chats are read by draftsmith data prompts --source {directory}."
            elif not directory.is_dir():
                found = "no such directory"
            elif started.exists():
                found, expected = "an unfinished stage", "a complete one"
                remedy = f"Continue it: {read_object(started, {'command': str})['command']}"
            raise InputError(str(directory), found, expected, remedy)

        raw = read_object(path, MANIFEST_SHAPE, "Delete this file and run the stage again: it keeps the shards.")
        if raw["schema_version"] != SCHEMA_VERSION:
            found = f"schema version {raw['schema_version']}"
            raise InputError(str(path), found, f"version {SCHEMA_VERSION}", f"Make it again: {raw['command']}")
        raw = {name: raw[name] for name in MANIFEST_SHAPE}
        raw["fields"] = tuple(Field(f["name"], f["dtype"], tuple(f["shape"])) for f in raw["fields"])
        raw["files"] = tuple(FileEntry(**entry) for entry in raw["files"])
        return Manifest(**raw, directory=opened)


def open_artifact(
    directory: Path,
    kind: str | tuple[str, ...] | None = None,
    identity: Mapping[str, Any] | None = None,
    check: str = "sha256",
) -> Manifest:
    """Return the manifest of an artifact that is complete, of this kind, intact, and made with these models.

    identity: nested hashes, compared with the artifact's (`compare_identity`).
    check: `sha256` reads and hashes every file; `size` compares sizes only, for terabytes of features.

    Raises:
        InputError: lists every differing key, with the command that makes the artifact again; or names the first
            missing, truncated or altered file.
    """
    assert check in ("sha256", "size")
    directory = Path(directory)
    manifest = Manifest.read(directory)
    kinds = (kind,) if isinstance(kind, str) else kind
    if kinds is not None and manifest.kind not in kinds:
        found = f"an artifact of kind {manifest.kind}"
        raise InputError(str(directory), found, f"kind {' or '.join(kinds)}", "Pass another directory.")

    # Models first: hashing files may take minutes.
    if differing := compare_identity(identity or {}, manifest.identity):
        found = "made with another " + "; ".join(f"{k}: {theirs} here, {ours} given" for k, ours, theirs in differing)
        remedy = f"Make it again: {manifest.command} (with the models given here, and another output)"
        if manifest.kind != "prompts" and not TEXT_KEYS.isdisjoint(key for key, *_ in differing):
            remedy = f"Make its prompts again first (draftsmith data prompts). {remedy}"
        raise InputError(str(directory), found, "the same identity", remedy)

    check_files(manifest, lambda name: check == "sha256")
    return manifest


def check_files(manifest: Manifest, hashed: Callable[[str], bool]) -> None:
    """Raise InputError for the first file that is missing or of another size, or whose hash differs, if it is hashed.

    hashed: whether to read the file of this name, which takes minutes for terabytes.
    """
    for entry in manifest.files:
        path, damage = manifest.directory / entry.name, None
        if not path.exists():
            damage = "no file"
        elif (size := path.stat().st_size) != entry.bytes:
            damage = f"{size} bytes, not {entry.bytes}"
        elif hashed(entry.name) and (digest := file_sha256(path)) != entry.sha256:
            damage = f"sha256 {digest[:12]}, not {entry.sha256[:12]}"
        if damage:
            remedy = f"Delete it and run the stage again, which rebuilds just this shard: {manifest.command}"
            raise InputError(str(path), damage, "the file as it was written", remedy)


def resolved(config: Any) -> dict[str, Any]:
    """Return a configuration dataclass as JSON values; paths become strings."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def decisive(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that are not volatile, of addresses whether there is one, as JSON values."""
    kept = {name: value for name, spec, value in options_of(config) if not spec.metadata.get("volatile")}
    kept |= {name: value is not None for name, spec, value in options_of(config) if spec.metadata.get("presence")}
    return json.loads(json.dumps(kept, default=str))


def command_line(stage: str, config: Any) -> str:
    """Return `draftsmith STAGE --field value ...` with the fields that differ from their defaults."""
    words = ["draftsmith", *stage.split()]
    for name, spec, value in options_of(config):
        if value != spec.default:
            as_json = isinstance(value, bool | list | tuple | dict | None)
            words += [f"--{name}".replace("_", "-"), json.dumps(value, default=str) if as_json else str(value)]
    return shlex.join(words)


def options_of(config: Any) -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield name, field and value of a configuration's options, with inherited shared options last."""
    for spec in sorted(dataclasses.fields(config), key=lambda field: bool(field.kw_only)):
        yield spec.name, spec, getattr(config, spec.name)


# -- artifacts that are joined

TEXTS, LABELS = ("prompts", "responses"), ("acceptance", "rollouts")
# Parts of an identity that joined artifacts share.
SHARED = ("tokenizer", "encoding", "chat_template", "own_template", "target", "draft")


def joined_digest(parts: Sequence[Part], manifests: Sequence[Manifest]) -> str:
    """Return the digests of all artifacts with their weights, in an order that does not depend on the list's.

    Raises:
        InputError: two of them are the same artifact.
    """
    digests: dict[str, Part] = {}
    for part, manifest in zip(parts, manifests, strict=True):
        other = digests.setdefault(manifest.digest, part)
        if other is not part:
            remedy = f"Pass it once: {Part(part.path, part.weight + other.weight)}."
            raise InputError("data", f"{other} and {part}, the same artifact", "different ones", remedy)
    return " + ".join(digest + digests[digest].times for digest in sorted(digests))


def agree(parts: Sequence[Part], manifests: Sequence[Manifest]) -> Manifest:
    """Return what the manifests of joined artifacts say together.

    Texts have one target, tokenizer and chat template; states one readout and dtype, too, and labels one sampling and
    depth. Texts whose sampling differs have none recorded together. counts: those of an epoch.

    Raises:
        InputError: the first field in which two of them differ.
    """
    pairs = itertools.combinations(zip(parts, manifests, map(_facts, manifests), strict=True), 2)
    for (one, manifest, ours), (other, _, theirs) in pairs:
        for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name != "kind", name)):
            # Answers of a server may lack hashes of its weights, and given answers have no target.
            may_lack = name == "own_template" or (name.startswith("target.") and manifest.kind in TEXTS)
            both = ours.get(name), theirs.get(name)
            if both[0] != both[1] and not (may_lack and None in both):
                found = f"{one.path} with {name} {both[0]} and {other.path} with {both[1]}"
                raise InputError("data", found, "artifacts that agree", "Make both alike, or train on one of them.")
    counts: Counter[str] = Counter()
    for part, manifest in zip(parts, manifests, strict=True):
        counts.update({name: round(part.weight * count) for name, count in manifest.counts.items()})
    identity = {name: value for manifest in reversed(manifests) for name, value in manifest.identity.items()}
    sampling = manifests[0].sampling
    if any(manifest.sampling != sampling for manifest in manifests):
        sampling = None
    return dataclasses.replace(
        manifests[0], identity=identity, sampling=sampling, counts=dict(counts), files=(), command=""
    )


def _facts(manifest: Manifest) -> dict[str, object]:
    """Return what joined artifacts must have alike, by name."""
    facts = flatten({name: manifest.identity[name] for name in SHARED if name in manifest.identity})
    if manifest.kind in TEXTS:
        has_answers = "loss_mask" in manifest.field_names
        return {**facts, "kind": "texts with answers" if has_answers else "prompts without answers"}
    facts["kind"] = manifest.kind
    if manifest.kind in LABELS:
        return facts | {"sampling": manifest.sampling, "depth": manifest.config.get("depth")}
    dtypes = ", ".join(f"{spec.name} {spec.dtype}" for spec in manifest.fields if spec.name.startswith("features"))
    return facts | {"readout": manifest.readout, "dtype": dtypes}

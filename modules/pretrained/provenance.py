"""Provenance: identities of models, hashes of files, package versions and the commit."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import subprocess
from collections.abc import Mapping
from pathlib import Path

from draftsmith.modules.drafters import learned
from draftsmith.modules.pretrained.reading import regular

# The package's directory, which is also the checkout if it runs from one.
ROOT = Path(__file__).resolve().parents[2]
# Hashes that are unknown for some models: weights behind a server, the tokenizer of a directory without one, code of
# a model that brings none. A record without them is not another model's.
OPTIONAL_HASHES = ("weights", "tokenizer", "encoding", "code")
PACKAGES = ("draftsmith", "torch", "transformers", "tokenizers", "datasets", "safetensors", "pyarrow", "numpy")


def compare_identity(current: Mapping[str, object], recorded: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Return (key, current, recorded) of each difference between nested hashes of models.

    Recorded models beyond the current ones do not count. A single hash that was not recorded was unknown (the weights
    of a model behind a server) and is not compared. A model that is not recorded at all differs, and so does a model
    with a trained drafter from the same without one.
    """
    ours, theirs = flatten(current), flatten(recorded)
    for key in theirs:
        if key.split(".")[-1] in learned() and key.split(".")[0] in current:
            ours.setdefault(key, None)
    for key in ours.keys() - theirs.keys():
        model, name = key.split(".")[0], key.split(".")[-1]
        if name not in learned() and (model in recorded or key in OPTIONAL_HASHES):
            del ours[key]
    return differences(ours, {key: theirs.get(key) for key in ours})


def changes(now: Mapping[str, object], before: Mapping[str, object]) -> str:
    """Describe what differs in nested settings, `seed: 0, now 1; ...`; empty if nothing does."""
    differing = differences(flatten(now), flatten(before))
    return "; ".join(f"{key}: {was}, now {is_now}" for key, is_now, was in differing)


def flatten(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten {"target": {"config": 1}} to {"target.config": 1}."""
    flat: dict[str, object] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def differences(left: Mapping[str, object], right: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Return (key, left, right) for keys whose values differ or that one side lacks."""
    keys = left.keys() | right.keys()
    return [(k, left.get(k), right.get(k)) for k in sorted(keys) if left.get(k) != right.get(k)]


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that an artifact's content may depend on.

    A machine may lack `datasets`, or run a checkout that is not installed.
    """
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def git_commit() -> str | None:
    """Return the commit of the checkout this package runs from; None outside of one."""
    if not (ROOT / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        # No git on this machine.
        return None
    return result.stdout.strip() if result.returncode == 0 else None

"""A trained drafter as it is, recorded as one of another target: so it decodes and is measured there."""

from __future__ import annotations

from pathlib import Path

from draftsmith.data.heads.card import model_card
from draftsmith.data.heads.directory import (
    check_sizes,
    drafter_kind,
    head_config,
    head_fields,
    load_head,
    of_target,
    save_head,
)
from draftsmith.data.heads.measured import WEIGHTS
from draftsmith.data.models.loading import tokenizer_identity
from draftsmith.data.store.manifest import file_sha256, git_commit, package_versions, warn_not_compared
from draftsmith.data.store.reading import read_object
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

UNCHANGED = "trained for another model, and taken over with every weight as it was"


def check_fits(directory: Path, target: CausalLM, path: str) -> DraftHead:
    """The head in the directory, on the CPU, which could draft for this target. path: of the target, as the user named
    it.

    Raises:
        InputError: no drafter, or one of another width, vocabulary, tokenizer or depth than the target has.
    """
    drafter_kind(directory)
    head = load_head(directory)
    assert isinstance(head, DraftHead)
    check_sizes("head", directory, head.config, target.info.hidden_size, target.info.vocab_size)
    if max(head.capture, default=0) > target.info.num_layers:
        found = f"{directory}, which reads layers {', '.join(map(str, head.capture))}"
        expected = f"layers up to {target.info.num_layers}, as {path} has"
        raise InputError("head", found, expected, "Pass a target of the same depth.")
    known, ours = tokenizer_of(directory), tokenizer_identity(path)
    if differing := [name for name in known if known[name] != ours[name]]:
        found = f"{directory}, trained with another {' and '.join(differing)}"
        expected = f"the tokenizer of {path}: token ids mean the same then"
        raise InputError("head", found, expected, "Train a new head for this target.")
    warn_not_compared(str(directory), [] if known else ["tokenizer"])
    return head


def tokenizer_of(directory: Path) -> dict[str, str]:
    """What a head records of the tokenizer that it was trained with: `tokenizer` and `encoding`, as
    `tokenizer_identity` has them, where they are known."""
    made = read_object(directory / "manifest.json", {"models?": (dict, None)})
    recorded = {**(head_config(directory).get("target") or {}), **(made.get("models") or {})}
    return {name: recorded[name] for name in ("tokenizer", "encoding") if recorded.get(name)}


def move_head(directory: Path, target: CausalLM, path: str, output: Path) -> Path:
    """Save the head in `directory` as one of this target in `output`: the same weights, another identity, and nothing
    of what was measured before. The settings of its training stay, so that it can be trained on. Raises: as
    `check_fits`."""
    head = check_fits(directory, target, path)
    made = read_object(directory / "manifest.json", {"config?": (dict, None)})
    source = {"path": str(directory), "sha256": file_sha256(directory / WEIGHTS)}
    identity = target.info.identity
    manifest = {
        "target": identity,
        "models": {**tokenizer_identity(path), "target": identity},
        "sampling": None,
        "of_target": list(of_target(directory)),
        "imported": {"producer": "draftsmith refresh", **source, "notes": [UNCHANGED]},
        "config": {**(made.get("config") or {}), "target": path},
        "packages": package_versions(),
        "git_commit": git_commit(),
    }
    card = model_card(head.kind, {**manifest, "head": head_fields(head)})
    return save_head(output, head, manifest, card)

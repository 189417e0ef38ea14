"""Saving a head that a script of one's own has trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.data.heads.card import model_card
from draftsmith.data.heads.directory import head_fields, save_head
from draftsmith.data.store.manifest import git_commit, package_versions
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.targets.base import CausalLM


def save(head: DraftHead, directory: str | Path, target: CausalLM, metrics: Mapping[str, float] | None = None) -> Path:
    """Write a head as training does: a directory that every command takes, with a model card.

    target: what it drafts for, whose identity is recorded. metrics: what was measured of it, for the card. Of its data
    and settings nothing is known here, and the card says so.
    """
    manifest: dict[str, Any] = {
        "target": target.info.identity,
        "of_target": list(head.of_target),
        "metrics": dict(metrics or {}),
        "packages": package_versions(),
        "git_commit": git_commit(),
    }
    return save_head(directory, head, manifest, model_card(head.kind, {"head": head_fields(head), **manifest}))

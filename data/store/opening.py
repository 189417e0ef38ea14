"""An artefact in Python, whatever its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from draftsmith.data.store.columns import open_columns
from draftsmith.data.store.datasets import (
    AcceptanceDataset,
    ArtefactDataset,
    FeatureDataset,
    Item,
    Lists,
    as_datasets,
)
from draftsmith.data.store.manifest import Manifest, open_artefact
from draftsmith.data.store.rollout_dataset import RolloutDataset
from draftsmith.modules.types import InputError

KINDS = {"features": FeatureDataset, "acceptance": AcceptanceDataset, "rollouts": RolloutDataset}
PROMPT = "prompt_ids"


class PromptsDataset(Dataset):
    """Prompts that wait for answers: a row is input_ids [T] int64, as the target will read them."""

    def __init__(self, directory: Path, manifest: Manifest):
        self.directory, self.manifest = directory, manifest
        self._ids = Lists(open_columns(directory, manifest, [PROMPT])[PROMPT])
        self.lengths = self._ids.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Item:
        return {"input_ids": torch.from_numpy(self._ids[row].astype(np.int64))}

    def to_datasets(self) -> Any:
        """Its columns as a `datasets.Dataset`, with tasks and later turns."""
        return as_datasets(self.directory, self.manifest)


def open_dataset(directory: str | Path) -> ArtefactDataset | PromptsDataset:
    """The rows of what a data command wrote, as a torch data set: prompts, responses, features, acceptance, rollouts.

    Its columns as a `datasets.Dataset` are those of its `to_datasets()`. That it was made with a certain target is not
    checked here; training does.

    Raises:
        InputError: no such artefact, or one that is incomplete or damaged.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    if manifest.kind in ("prompts", "responses"):
        manifest = open_artefact(directory)
        asked = PROMPT in {spec.name for spec in manifest.fields}
        return PromptsDataset(directory, manifest) if asked else ArtefactDataset(directory, manifest)
    if manifest.kind not in KINDS:
        expected = f"one of prompts, responses, {', '.join(KINDS)}"
        raise InputError(str(directory), f"an artefact of kind {manifest.kind}", expected, "Pass another directory.")
    return KINDS[manifest.kind](directory)

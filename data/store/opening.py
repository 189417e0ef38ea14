"""An artefact in Python, whatever its kind."""

from __future__ import annotations

from pathlib import Path

from draftsmith.data.store.datasets import AcceptanceDataset, ArtefactDataset, FeatureDataset
from draftsmith.data.store.manifest import Manifest, open_artefact
from draftsmith.data.store.rollout_dataset import RolloutDataset
from draftsmith.modules.types import InputError

TEXTS = ("prompts", "responses")


def open_dataset(directory: str | Path) -> ArtefactDataset:
    """The rows of what a data command wrote, as a torch data set: prompts, responses, features, acceptance, rollouts.

    Its columns as a `datasets.Dataset` are those of its `to_datasets()`. That it was made with a certain target is not
    checked here; training does.

    Raises:
        InputError: no such artefact, or one that is incomplete or damaged.
    """
    directory = Path(directory)
    kind = Manifest.read(directory).kind
    if kind in TEXTS:
        return ArtefactDataset(directory, open_artefact(directory, TEXTS))
    if kind == "features":
        return FeatureDataset(directory, check="size")
    if kind == "acceptance":
        return AcceptanceDataset(directory)
    if kind == "rollouts":
        return RolloutDataset(directory)
    expected = f"one of {', '.join((*TEXTS, 'features', 'acceptance', 'rollouts'))}"
    raise InputError(str(directory), f"an artefact of kind {kind}", expected, "Pass another directory.")

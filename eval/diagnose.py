"""`draftsmith diagnose`: why a head drafts badly, or that nothing is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.heads.diagnosis import diagnose
from draftsmith.data.models.loading import load_lm, text_identity
from draftsmith.data.progress import say
from draftsmith.data.settings import Loading, check_positive
from draftsmith.data.store.manifest import open_artefact
from draftsmith.data.store.shards import Rows
from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class DiagnoseConfig(Loading):
    """Measures a trained drafter, its data and its target, and names the likeliest cause of bad drafts with its remedy.

    Attributes:
        head: Directory of a trained drafter of any kind. Where it lies in a training's output, that is read too.
        data: Answers like those that it was trained on: responses, features, or supervised prompts.
        target: Directory or hub id of the target model, or embedded:target.
        limit: Rows to read.
    """

    head: Path
    data: Path
    target: str = "embedded:target"
    limit: int = 200


def run(config: DiagnoseConfig) -> None:
    """Print the diagnosis.

    Raises:
        InputError: no drafter, another target's, or data without answers or of another tokenizer.
    """
    check_positive(config, "limit")
    manifest = open_artefact(config.data, ("responses", "features", "prompts"), text_identity(config.target), "size")
    if "input_ids" not in {spec.name for spec in manifest.fields}:
        remedy = "Make responses first (data responses)."
        raise InputError("data", f"{config.data}, prompts without answers", "answers", remedy)
    rows = list(Rows(config.data, manifest, limit=config.limit).iterate())
    say(diagnose(config.head, load_lm(config.target, **config.loading), config.target, rows, manifest))

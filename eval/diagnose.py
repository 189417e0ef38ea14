"""`draftsmith diagnose`: why a head's acceptance is low."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.console import print_text
from draftsmith.data.heads.diagnosis import diagnose
from draftsmith.data.settings import Loading, check_positive
from draftsmith.data.store.manifest import open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.modules.pretrained.heads import head_config
from draftsmith.modules.pretrained.models import load_lm, vocabulary_size
from draftsmith.modules.pretrained.tokenizers import text_identity
from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class DiagnoseConfig(Loading):
    """Measures a trained draft head, its data and its target, and names the likeliest cause of low acceptance with its
    remedy.

    Attributes:
        draft: Directory of a trained draft head of any kind. The training's output around it is read too.
        data: Answers like those that it was trained on: responses, features, or supervised prompts.
        target: Directory or hub id of the target model, or embedded:target.
        limit: Rows to read.
    """

    draft: str
    data: Path
    target: str = "embedded:target"
    limit: int = 200


def run(config: DiagnoseConfig) -> None:
    """Print the diagnosis of a head.

    Raises:
        InputError: no draft head, another target's, or data without answers or of another tokenizer.
    """
    check_positive(config, "limit")
    manifest = open_artifact(config.data, ("responses", "features", "prompts"), text_identity(config.target), "size")
    if "input_ids" not in {spec.name for spec in manifest.fields}:
        remedy = "Make responses first (data responses)."
        raise InputError("data", f"{config.data}, prompts without answers", "answers", remedy)
    rows = list(Rows(config.data, manifest, limit=config.limit, vocab_size=vocabulary_size(config.target)).iterate())
    # Its errors come before the target is loaded.
    head_config(config.draft)
    target = load_lm(config.target, **config.loading)
    print_text(diagnose(Path(config.draft), target, config.target, rows, manifest))

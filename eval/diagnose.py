"""`draftsmith diagnose`: why a head drafts badly, or that nothing is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.heads.diagnosis import Finding, Subject, curve_of, diagnose, report
from draftsmith.data.heads.directory import load_draft_head
from draftsmith.data.heads.readings import texts_of
from draftsmith.data.models.loading import llama_shape, load_lm, text_identity
from draftsmith.data.progress import say
from draftsmith.data.settings import Loading, check_positive
from draftsmith.data.store.manifest import open_artefact
from draftsmith.data.store.reading import read_object
from draftsmith.data.store.shards import Rows
from draftsmith.modules.types import InputError

ANSWER = "Make responses first (data responses)."


@dataclass(frozen=True)
class DiagnoseConfig(Loading):
    """Measures a trained drafter, its data and its target, and names the likeliest cause of bad drafts with its remedy.

    Attributes:
        head: Directory of a trained drafter: EAGLE, EAGLE-3, Medusa. Where it lies in a training's output, that is read
            too.
        data: Answers like those that it was trained on: responses, features, or supervised prompts.
        target: Directory or hub id of the target model, or embedded:target.
        limit: Rows to read.
    """

    head: Path
    data: Path
    target: str = "embedded:target"
    limit: int = 200


def run(config: DiagnoseConfig) -> list[Finding]:
    """Print the findings; returns them.

    Raises:
        InputError: no drafter, another target's, or data without answers or of another tokenizer.
    """
    check_positive(config, "limit")
    manifest = open_artefact(config.data, ("responses", "features", "prompts"), text_identity(config.target), "size")
    if "input_ids" not in {spec.name for spec in manifest.fields}:
        raise InputError("data", f"{config.data}, prompts without answers", "answers", ANSWER)
    target = load_lm(config.target, **config.loading)
    head = load_draft_head(config.head, target)
    try:
        shape = llama_shape(target, config.target)
    except InputError:  # of a family whose rotary positions are not known
        shape = None
    rows = Rows(config.data, manifest, limit=config.limit).iterate()
    texts = texts_of(rows, min(target.info.max_position, head.config.max_position))
    if not texts:
        raise InputError("data", f"{config.data} without answers", "answers", ANSWER)
    made = read_object(config.head / "manifest.json", {})
    subject = Subject(head, target, config.target, texts, manifest, made, shape, curve_of(config.head))
    answers = sum(sum(text.mask) for text in texts)
    say(f"{head.kind} head {config.head} on {len(texts)} texts of {config.data}, {answers:,} answer tokens")
    findings, bad = diagnose(subject)
    say(report(findings, bad))
    return findings

"""`draftsmith diagnose`: why a head drafts badly, or that nothing is wrong with it; and what ends its drafts best."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.acceptance import AcceptanceConfig, labels_of
from draftsmith.data.console import print_table, print_text
from draftsmith.data.heads.diagnosis import diagnose
from draftsmith.data.heads.directory import FrozenDrafter, kind_at, load_drafter
from draftsmith.data.models.loading import check_same_tokenizer, load_lm, text_identity, vocabulary_size
from draftsmith.data.rollouts import Rollouts
from draftsmith.data.settings import Loading, check_positive
from draftsmith.data.store.manifest import Manifest, open_artefact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.repetition import Repetition
from draftsmith.eval.costs import MeasuredTimes
from draftsmith.eval.stop_gain import advice, drafted_rounds, gains_table, stop_gains
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

DEPTH, CS = 10, (0.05, 0.1, 0.2, 0.35)
CAPACITY = 512  # tokens: what c is measured on is shorter


@dataclass(frozen=True)
class DiagnoseConfig(Loading):
    """Measures a trained drafter, its data and its target, and names the likeliest cause of bad drafts with its remedy.
    For a draft model too, it tells what ending its drafts by a prediction would gain, before an acceptance head is
    trained.

    Attributes:
        draft: Directory of a trained drafter of any kind, or directory or hub id of a draft model, or embedded:draft.
            Where a drafter lies in a training's output, that is read too.
        data: Answers like those that it was trained on: responses, features, or supervised prompts.
        target: Directory or hub id of the target model, or embedded:target.
        limit: Rows to read.
        stops: Tell what ends drafts best, at the answers' temperature. It takes as long as the answers took, or twice.
        c: Time of one more drafted token by that of a round without a draft, where it will decode; 0 measures it here.
    """

    draft: str
    data: Path
    target: str = "embedded:target"
    limit: int = 200
    stops: bool = True
    c: float = 0.0


def run(config: DiagnoseConfig) -> None:
    """Print the diagnosis.

    Raises:
        InputError: no drafter, another target's, or data without answers or of another tokenizer.
    """
    check_positive(config, "limit")
    if not 0 <= config.c < float("inf"):
        raise InputError("c", config.c, "a time, or 0 to measure it", "Correct it.")
    manifest = open_artefact(config.data, ("responses", "features", "prompts"), text_identity(config.target), "size")
    if "input_ids" not in {spec.name for spec in manifest.fields}:
        remedy = "Make responses first (data responses)."
        raise InputError("data", f"{config.data}, prompts without answers", "answers", remedy)
    source = Rows(config.data, manifest, limit=config.limit, vocab_size=vocabulary_size(config.target))
    rows = list(source.iterate())
    is_model = kind_at(config.draft) is None
    if is_model:
        check_same_tokenizer(config.target, config.draft)
    target = load_lm(config.target, **config.loading)
    if not is_model:
        print_text(diagnose(Path(config.draft), target, config.target, rows, manifest))
    if config.stops:
        drafter = load_drafter(config.draft, lambda: target, lambda path: load_lm(path, **config.loading))
        tell_stops(config, target, drafter, rows, manifest)


def tell_stops(
    config: DiagnoseConfig, target: CausalLM, drafter: FrozenDrafter, rows: list[dict], manifest: Manifest
) -> None:
    """Print what ends the drafter's drafts best."""
    depth = min(DEPTH, getattr(drafter.head and drafter.head.config, "num_heads", DEPTH))
    how = AcceptanceConfig(
        responses=config.data, target=config.target, output=config.data, draft=config.draft, labels="rollout",
        depth=depth, stride=1,
    )  # fmt: skip
    sampling = how.sampling(manifest.sampling or {})
    rollouts = labels_of(how, sampling, target, drafter)
    assert isinstance(rollouts, Rollouts)
    heads = {} if drafter.head is None else {drafter.name: drafter.head}
    models = Models(target, draft=drafter.lm, heads=heads, capacity=min(CAPACITY, target.info.max_position))
    c = config.c or MeasuredTimes().step_cost(models, drafter.name)
    found = stop_gains(drafted_rounds(rollouts, rows), sorted({*CS, c}), sampling[0].greedy)
    print_table(gains_table(found, len(rows)))
    copied = Repetition.of((row["input_ids"], row["loss_mask"]) for row in rows)
    mode = "greedy" if sampling[0].greedy else f"temperature {sampling[0].temperature:g}"
    print_text(f"Of the answers' tokens ({mode}), {copied.text()}.")
    print_text(advice(next(at for at in found if at.c == c)))

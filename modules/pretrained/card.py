"""Model cards of heads and exports: Markdown filled from a manifest, `measured.json` and an export's facts.

A card says what a reader needs to judge and use a head; hashes, paths and every option are in `manifest.json`. What is
not known is written as unknown. `measured.json` is not part of the head: `eval bench --card` writes it and the card
anew.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.drafters import MODEL, head_class, learned
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.formats import GGUF, formats_of
from draftsmith.modules.pretrained.files import write_json, write_text
from draftsmith.modules.pretrained.heads import (
    class_of,
    config_from_json,
    head_config,
    head_fields,
    made_with,
    save_head,
)
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.proof import Proof

MEASURED, CARD, WEIGHTS = "measured.json", "README.md", "model.safetensors"
ACCEPTANCE_HEAD = (
    "Predicts from a drafter's last hidden state whether the target will keep a drafted token (SpecDec++, Huang et al. "
    "2024). It stops drafts that are likely to fail."
)
METRICS = {
    "kl": "binary KL from the acceptance probability, nats a token, without w_acc and w_rej, calibrated output",
    "brier": "mean squared distance from the acceptance probability, calibrated output",
    "ece": "calibration error, 15 bins of equal mass, corrected for the loss' weights only",
    "ece_platt": "the same with the fitted scale and shift, 2-fold cross-fitted",
    "auc": "AUC with soft labels: each token counts P as positive, 1-P as negative",
    "auc_q": "the same for the draft's own probability of the token: what the head has to beat",
    "loss": "training loss on held-out samples",
    "feature_loss": "smooth-L1 distance of features",
    "token_loss": "soft cross-entropy against the target's distribution, nats a token",
    "top1": "share of response tokens where the head's first choice is the target's, teacher-forced",
    "top1_N": "the same of the head for token {} of a draft",
    "accepted": "probability that the target accepts the first drawn token, at temperature 1",
    "accepted_N": "share of the drafted tokens {} that are accepted, in the rounds of tau",
    "known": "share of the target's first choices that the draft vocabulary has",
    "tau": "emitted tokens per target call, along answers of the target",
    "tau_general": "the same on general prompts that ship",
}
TEMPLATE = Path(__file__).with_name("card.md.jinja")


def model_card(
    kind: str,
    manifest: Mapping[str, Any],
    *,
    measured: Mapping[str, Any] | None = None,
    export: Mapping[str, Any] | None = None,
) -> str:
    """Render the card of a head.

    manifest: `manifest.json`, with `head` of config.json if known. All of it is optional: an imported head has
        `imported` (producer, path, ...) in place of config, step and metrics.
    measured: content of `measured.json`.
    export: of an exported directory: `format`, `command` (serves it), `checks` (passed), `head` (sha256),
        `weights` (dtype) and `notes`.
    """
    from huggingface_hub import ModelCard, ModelCardData

    head, config, imported, metrics, identity = (
        manifest.get(name) or {} for name in ("head", "config", "imported", "metrics", "target")
    )
    drafts = kind in learned()
    # An acceptance head reads the hidden states of a draft model, or of the target of a drafting head.
    drafter = next((name for name in learned() if name in identity), None)
    # Only a benchmark may know the target of an acceptance head.
    target = config.get("target") or imported.get("target") or (measured or {}).get("settings", {}).get("target")
    reads = target if drafts else config.get("head") or imported.get("head")
    tag, method = _tag_and_method(kind, head, drafter)
    saved_as_model = drafts and head_class(kind).saved_as_model

    model = "target" if drafts else _title(drafter) if drafter else "draft"
    models = {
        f"{model}, {'whose distributions it learned' if saved_as_model else 'whose hidden states it reads'}": reads
    }
    if not drafts:
        models["target, whose verdicts it predicts"] = target
    bound = "Its identity is recorded: `draftsmith` refuses other models."
    if saved_as_model:
        bound = "It drafts for any model of that tokenizer, best for this one."
    elif not identity:
        bound = "No identity is recorded: `draftsmith` takes any model of its width and vocabulary."
    if "bound" in manifest:
        old = _code(manifest["bound"].get("from")) or "another model"
        bound += f" The head was trained for {old}, and not for this one: what was measured there does not hold here."

    # Commands that try the head and export it to every format that holds it. Options that name the models in a command;
    # what is not known is left to the reader in capitals.
    named = f"--target {shlex.quote(target or 'TARGET')} --head "
    named += "DIR" if drafts else f"{shlex.quote(reads or 'DRAFT')} --acceptance DIR"
    bench = f"draftsmith eval bench {named} --methods {method} --data FILE --output runs/bench"
    commands = [f"draftsmith decode PROMPT {named} --method {method}"]
    settings = config_from_json(class_of(kind).Config, head) if head else None
    for format in formats_of(kind):
        if settings is not None and format.holds(settings):
            line = f"draftsmith export --head DIR --format {format.name} --output DIR-{format.name}"
            commands.append(line + (f" --target {shlex.quote(target or 'TARGET')}" if drafts else ""))
    if saved_as_model:
        commands.append(f"draftsmith export {named} --format {GGUF} --output DIR-{GGUF}")

    rows = [] if measured is None else measured["methods"]
    several = len({row["temperature"] for row in rows}) > 1
    license = manifest.get("license")
    # The hub takes `other` with a name for a license that it does not list, and hub ids only as base models.
    base = ((target if drafter else reads) or "").partition("@")[0]
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists()
    card_data = ModelCardData(
        license=license or "other",
        license_name=None if license else "not-stated",
        library_name="transformers" if saved_as_model else export["format"] if export else "draftsmith",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draftsmith", tag],
        base_model=base if is_hub_id else None,
    )
    options = {name: value for name, value in (manifest.get("options") or {}).items() if value not in (None, "")}
    card = ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        code=_code,
        meaning=_meaning,
        kind=kind,
        title=_title(kind),
        what=" ".join((head_class(kind).__doc__ or "").split("\n\n")[0].split()) if drafts else ACCEPTANCE_HEAD,
        manifest=manifest,
        head=head,
        imported=imported,
        export=export,
        unknown="Unknown: the head was imported." if imported else "Unknown.",
        models=models,
        bound=bound,
        teacher=manifest.get("teacher") and Proof.from_json(manifest["teacher"]),
        options=yaml.safe_dump(options, sort_keys=False).strip(),
        metrics=metrics,
        measured=measured,
        labels={row["method"] + (f", temperature {row['temperature']:g}" if several else ""): row for row in rows},
        bench=bench + ("" if saved_as_model else " --card"),
        drafts=drafts,
        saved_as_model=saved_as_model,
        commands="\n".join(commands),
        license=license,
        source=_code(reads) or f"the {model}",
    )
    return re.sub(r"\n{3,}", "\n\n", card.content).strip() + "\n"


def _title(kind: str) -> str:
    return "Acceptance head" if kind == AcceptanceHead.kind else head_class(kind).title or f"{kind} head"


def _tag_and_method(kind: str, head: Mapping[str, object], drafter: str | None) -> tuple[str, str]:
    """Return a head's tag on the model hub, and the method of `decode` that tries it."""
    if kind in learned():
        return ("assisted-generation", "spec:k=5") if kind == MODEL else (kind, kind)
    option = f":drafter={drafter}" if drafter else ""
    return "specdec++", f"specdec++:h=0.7{option}"


def _meaning(metric: str) -> str:
    name, _, number = metric.rpartition("_")
    return METRICS.get(metric) or METRICS.get(f"{name}_N", "").format(number)


def _code(value: object) -> str:
    """Format a value as Markdown code on one line; empty for None."""
    if value is None:
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)}`"


def write_measured(directory: str | Path, measured: Mapping[str, Any]) -> None:
    """Replace a head's `measured.json` and write its card anew.

    measured: `settings`, `methods`, `prompts`, `clock`, `hardware`, `date`, `git_commit` (eval/bench/command.py).
    """
    directory = Path(directory)
    config = head_config(directory)
    write_json(directory / MEASURED, {**measured, "head_sha256": file_sha256(directory / WEIGHTS)})
    manifest = {"head": config["head"], **read_object(directory / "manifest.json", {})}
    write_text(directory / CARD, model_card(config["kind"], manifest, measured=measured_of(directory)))


def measured_of(directory: str | Path) -> dict[str, Any] | None:
    """Read a head's `measured.json`; None if there is none, or it was measured with other weights."""
    path = Path(directory) / MEASURED
    if not path.exists():
        return None
    shape = {"head_sha256": str, "methods": [dict], "settings": dict, "prompts": dict, "hardware": dict}
    measured = read_object(path, shape, "Delete it, or measure again: eval bench --card.")
    # Weights that were trained further have not been measured.
    return measured if measured["head_sha256"] == file_sha256(path.with_name(WEIGHTS)) else None


def save(head: DraftHead, directory: str | Path, target: CausalLM, metrics: Mapping[str, float] | None = None) -> Path:
    """Save a head that a script trained as a head directory with a model card, which every command takes.

    target: the model it drafts for, whose identity is recorded. metrics: measured numbers for the card. The card says
    that data and settings are unknown.
    """
    manifest: dict[str, object] = {
        "target": target.info.identity,
        "tied_to_target": list(head.tied_to_target),
        "metrics": dict(metrics or {}),
        **made_with(),
    }
    return save_head(directory, head, manifest, model_card(head.kind, {"head": head_fields(head), **manifest}))

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
from draftsmith.modules.formats import formats_of
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

    head, config, imported, identity = (manifest.get(name) or {} for name in ("head", "config", "imported", "target"))
    drafts = kind in learned()
    # An acceptance head reads the hidden states of a draft model, or of the target of a drafting head.
    drafter = next((name for name in learned() if name in identity), None)
    # Only a benchmark may know the target of an acceptance head.
    target = config.get("target") or imported.get("target") or (measured or {}).get("settings", {}).get("target")
    reads = target if drafts else config.get("head") or imported.get("head")
    tag, method = _tag_and_method(kind, head, drafter)
    saved_as_model = drafts and head_class(kind).saved_as_model

    # Options that name the models in a command; what is not known is left to the reader in capitals.
    named = f"--target {shlex.quote(target or 'TARGET')} --head "
    named += "DIR" if drafts else f"{shlex.quote(reads or 'DRAFT')} --acceptance DIR"
    settings = config_from_json(class_of(kind).Config, head) if head else None
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
        kind=kind,
        title=_title(kind),
        what=" ".join((head_class(kind).__doc__ or "").split("\n\n")[0].split()) if drafts else "",
        manifest=manifest,
        export=export,
        measured=measured,
        model="target" if drafts else _title(drafter) if drafter else "draft",
        reads=reads,
        target=target,
        teacher=manifest.get("teacher") and Proof.from_json(manifest["teacher"]),
        options=yaml.safe_dump(options, sort_keys=False).strip(),
        named=named,
        method=method,
        drafts=drafts,
        saved_as_model=saved_as_model,
        formats=[format.name for format in formats_of(kind) if settings is not None and format.holds(settings)],
        quote=shlex.quote,
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


def measured_chains(
    measured: Mapping[str, Any] | None, kind: str, temperature: float | None = None
) -> dict[int, Mapping[str, Any]]:
    """Return drafted tokens a round -> row, of the head's chains in `measured.json`, at a temperature if named."""
    rows = [] if measured is None else measured["methods"]
    kept = [row for row in rows if temperature is None or row["temperature"] == temperature]
    chains = ((re.fullmatch(rf"{kind}(?:@[^:]*)?:k=(\d+)", row["method"]), row) for row in kept)
    return {int(chain[1]): row for chain, row in chains if chain}


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

"""Model cards of heads and exports: Markdown filled from a manifest, `measured.json` and an export's facts.

A card says what a reader needs to judge and use a head; hashes, paths and every option are in `manifest.json`. What is
not known is written as unknown. `measured.json` is not part of the head: `eval bench --card` writes it and the card
anew.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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

MEASURED, CARD, WEIGHTS = "measured.json", "README.md", "model.safetensors"
ACCEPTANCE_HEAD = (
    "Predicts from a drafter's last hidden state whether the target will keep a drafted token (SpecDec++, Huang et al. "
    "2024). It stops drafts that are likely to fail."
)
TITLES = {
    "draft": "Draft model",
    "eagle": "EAGLE head",
    "eagle3": "EAGLE-3 head",
    "hydra": "Hydra heads",
    "medusa": "Medusa heads",
}
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
    "top3": "share where the target's choice is among the head's first three",
    "accepted": "probability that the target accepts the first drawn token, at temperature 1",
    "chain_length": "tokens per round of its drafts, at temperature 1",
    "chain_length_greedy": "tokens per round of its drafts, greedy",
    "tau": "emitted tokens per target call, greedy chains, end tokens ignored",
    "tau_behind_end": "share of those tokens that come behind an end token: the target serves no such text",
}
AGREEMENT = "share of drafts whose token {} is the target's choice, of those that were right until then"
COUNTING_RULE = """\
tau is emitted tokens per target call under {modes}. Emitted tokens are cut at the end token (kept) and at \
{max_new_tokens} before they are counted; the token that the target adds to a draft (the bonus token) is one of them; \
the prefill is one of the target's calls. Over prompts it is a ratio of sums, never a mean of ratios. Speed-up is \
tokens per second of {clock}, over autoregressive decoding by the same engine in the same run.

Measured {date} on {count} prompts of {source}, {batch_size} at a time, in {dtype} on {machine}."""


@dataclass(frozen=True)
class HeadCard:
    """Part of a model card that depends on the kind of head.

    title, what: name, and description in a sentence or two. tag: for the model hub. method: for `decode` to try it.
    shape: lines on its sizes.
    """

    title: str
    what: str
    tag: str
    method: str
    shape: tuple[str, ...] = ()


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
    head, config, imported, metrics, identity = (
        manifest.get(name) or {} for name in ("head", "config", "imported", "metrics", "target")
    )
    drafts, unknown = kind in learned(), "Unknown: the head was imported." if imported else "Unknown."
    # An acceptance head reads the hidden states of a draft model, or of the target of a drafting head.
    drafter = next((name for name in learned() if name in identity), None)
    # Only a benchmark may know the target of an acceptance head.
    target = config.get("target") or imported.get("target") or (measured or {}).get("settings", {}).get("target")
    draft = config.get("draft") or imported.get("draft")
    reads = target if drafts else draft
    about = _drafter_card(kind, head) if drafts else _acceptance_card(head, drafter)

    facts = list(about.shape)
    if imported:
        facts.append(f"- imported from {imported.get('producer')}, {_code(imported.get('path'))}")
        facts += [f"- {note}" for note in imported.get("notes", ())]
    if export is not None:
        facts.append(f"- weights in {export['weights']}, of a head of sha256 `{export['head']['sha256']}`")
        facts += [f"- {note}" for note in export.get("notes", ())]

    model = "target" if drafts else _drafter_card(drafter, {}).title if drafter else "draft"
    saved_as_model = drafts and head_class(kind).saved_as_model
    read = "whose distributions it learned" if saved_as_model else "whose hidden states it reads"
    models = {f"{model}, {read}": reads}
    if not drafts:
        models["target, whose verdicts it predicts"] = target
    bound = "Its identity is recorded: `draftsmith` refuses other models."
    if saved_as_model:
        bound = "It drafts for any model of that tokenizer, best for this one."
    elif not identity:
        bound = "No identity is recorded: `draftsmith` takes any model of its width and vocabulary."
    options = {name: value for name, value in (manifest.get("options") or {}).items() if value not in (None, "")}
    training = _fenced(yaml.safe_dump(options, sort_keys=False).strip(), language="yaml")
    # Options that name the models in a command; what is not known is left to the reader in capitals.
    named = f"--target {shlex.quote(target or 'TARGET')} --draft "
    named += "DIR" if drafts else f"{shlex.quote(reads or 'DRAFT')} --acceptance DIR"
    bench = f"draftsmith eval bench {named} --methods {about.method} --prompts FILE --output runs/bench"
    bench += "" if saved_as_model else " --card"
    sections = {
        "Target": f"{_bullets(models)}\n\n{bound}",
        "Data": _data_section(manifest) or unknown,
        "Training": unknown,
        "Measured on held-out samples": _metrics_section(metrics) or unknown,
        "tau by task": _tau_section(measured) or f"Not measured yet. This measures it:\n\n{_fenced(bench)}",
    }
    if manifest.get("step"):
        sections["Training"] = f"{manifest['step']:,} steps of `draftsmith train {kind}`:\n\n{training}"
    if not drafts:
        sections["Calibration"] = _calibration_section(head, metrics, manifest.get("sampling"), unknown)

    # Commands that try the head and export it to every format that holds it.
    commands = [f"draftsmith decode PROMPT {named} --method {about.method}"]
    settings = config_from_json(class_of(kind).Config, head) if head else None
    for format in formats_of(kind):
        if settings is not None and format.holds(settings):
            line = f"draftsmith export --head DIR --format {format.name} --output DIR-{format.name}"
            commands.append(line + (f" --target {shlex.quote(target or 'TARGET')}" if drafts else ""))
    if saved_as_model:
        commands.append(f"draftsmith export {named} --format {GGUF} --output DIR-{GGUF}")
    loads = " transformers, vLLM and SGLang load it as it is, as a draft model." if saved_as_model else ""
    usage = f"DIR is this directory.{loads}\n\n{_fenced(*commands)}"
    return _page(
        about,
        base_model=target if drafter else reads,
        facts=facts,
        sections={**sections, "How to use it": usage if export is None else _export_section(export)},
        license=manifest.get("license") or config.get("license"),
        sources=f"{_code(reads) or f'the {model}'}, from which it was made, and to the data",
        manifest=manifest,
        format=export["format"] if export else "",
        saved_as_model=saved_as_model,
    )


def _page(
    about: HeadCard,
    base_model: str | None,
    facts: Sequence[str],
    sections: Mapping[str, str],
    license: str | None,
    sources: str,
    manifest: Mapping[str, Any],
    format: str,
    saved_as_model: bool = False,
) -> str:
    """Join the parts of a card under the front matter by which the model hub lists a model."""
    # The hub takes `other` with a name for a license that it does not list, and hub ids only as base models.
    matter: dict[str, Any] = {
        **({"license": license} if license else {"license": "other", "license_name": "not-stated"}),
        "library_name": "transformers" if saved_as_model else format or "draftsmith",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draftsmith", about.tag],
    }
    base = (base_model or "").partition("@")[0]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists():
        matter["base_model"] = base
    stated = f"`{license}`, as stated when it was made." if license else "Not stated."
    packages = manifest.get("packages") or {}
    names = [f"{name} {packages[name]}" for name in ("draftsmith", "torch", "transformers") if packages.get(name)]
    names += [f"commit {manifest['git_commit']}"] if manifest.get("git_commit") else []
    ends = {
        "License": f"{stated} Other licenses apply to {sources}: look them up before you share it.",
        "Versions": f"{', '.join(names)}." if names else "Unknown.",
    }
    title = f"{about.title}, exported for {format}" if format else about.title
    parts = [f"# {title}", about.what, "\n".join(facts)]
    parts += [f"## {heading}\n\n{text}" for heading, text in {**sections, **ends}.items()]
    return f"---\n{yaml.safe_dump(matter, sort_keys=False)}---\n\n" + "\n\n".join(filter(None, parts)) + "\n"


def _drafter_card(kind: str, head: Mapping[str, Any]) -> HeadCard:
    what = " ".join((head_class(kind).__doc__ or "").split("\n\n")[0].split())
    tag, method = ("assisted-generation", "spec:k=5") if kind == MODEL else (kind, kind)
    return HeadCard(TITLES.get(kind, f"{kind} head"), what, tag, method, _settings(head))


def _acceptance_card(head: Mapping[str, Any], drafter: str | None) -> HeadCard:
    option = f":drafter={drafter}" if drafter else ""
    method = f"specdec++:h=0.7{option}" if head.get("state", "after") == "after" else f"online:head=on{option}"
    return HeadCard("Acceptance head", ACCEPTANCE_HEAD, "specdec++", method, _settings(head))


def _settings(head: Mapping[str, Any]) -> tuple[str, ...]:
    """List a head's settings; those of its decoder layers, `llama`, stand on the last line."""
    lines = [f"- {name}: {_code(value)}" for name, value in head.items() if name != "llama"]
    layers = ", ".join(f"{name} {_code(value)}" for name, value in head.get("llama", {}).items())
    return (*lines, f"- decoder layers: {layers}") if layers else tuple(lines)


def _data_section(manifest: Mapping[str, Any]) -> str:
    lines = []
    for name, part in (manifest.get("samples") or {}).items():
        line = f"- {name}: {part['samples']:,} samples, {part['tokens']:,} tokens"
        # A sample of rollouts is a block of drafted tokens: the number of samples says nothing.
        if manifest.get("labels") == "rollout":
            line = f"- {name}: {part['tokens']:,} tokens of labeled drafts"
        if "answers" in part:
            median = f"median {part['tokens_p50']:,.0f} tokens"
            line += f"; {part['answers']:,} responses of {part['answer_tokens']:,} tokens, {median}"
        lines.append(line)
    sampling = manifest.get("sampling")
    if lines and sampling and "labels" not in manifest:
        lines.append(f"- the target's answers at temperature {sampling['temperature']:g}")
    return "\n".join(lines)


def _metrics_section(metrics: Mapping[str, float]) -> str:
    rows = []
    for name, value in sorted(metrics.items()):
        meaning = METRICS.get(name, "")
        if name.startswith("top1_"):
            meaning = f"the same of the head for token {name.removeprefix('top1_')} of a draft"
        if name.startswith("agreement_"):
            meaning = AGREEMENT.format(name.removeprefix("agreement_"))
        rows.append((name, f"{value:.4g}", meaning))
    return _table(("metric", "value", "meaning"), rows) if rows else ""


def _tau_section(measured: Mapping[str, Any] | None) -> str:
    if measured is None:
        return ""
    temperatures = sorted({row["temperature"] for row in measured["methods"]})
    rows = []
    for row in measured["methods"]:
        label = f"{row['method']}, temperature {row['temperature']:g}" if len(temperatures) > 1 else row["method"]
        for task, part in {"all": row, **(row.get("by_task") or {})}.items():
            tau, speedup = f"{part['tau']:.3f}", f"{part['speedup']:.2f}x"
            rows.append((task, label, str(part["prompts"]), f"{part['tokens']:,}", tau, speedup))
    table = _table(("task", "method", "prompts", "tokens", "tau", "speed-up"), rows)

    # A measurement means nothing without its rule, prompts and machine.
    settings, prompts, hardware = measured["settings"], measured["prompts"], measured["hardware"]
    cuts = f"top-k {settings['top_k'] or 'all'}, top-p {settings['top_p']:g}"
    modes = [f"sampling at temperature {t:g}, {cuts}" if t else "greedy decoding" for t in temperatures]
    rule = COUNTING_RULE.format(
        modes=" and under ".join(modes),
        clock="CPU time" if measured["clock"] == "cpu" else "wall time",
        date=measured["date"],
        count=prompts["count"],
        source=_code(prompts["source"]),
        machine=hardware.get("gpu") or hardware.get("cpu", "an unknown machine"),
        **{name: settings[name] for name in ("max_new_tokens", "batch_size", "dtype")},
    )
    return f"{table}\n\n{rule}"


def _calibration_section(head: Mapping[str, Any], metrics: Mapping[str, float], sampling: Any, unknown: str) -> str:
    """Describe how an acceptance head's output becomes a probability, where that holds, and how good it was."""
    lines = [unknown]
    if sampling:
        lines = [f"Labels and calibration hold for this sampling only: {_code(sampling)}."]
    if "ece_platt" in metrics:
        lines.append(f"Calibration error on held-out tokens: {metrics['ece_platt']:.4g}.")
    return "\n\n".join(lines)


def _export_section(export: Mapping[str, Any]) -> str:
    checks = "\n".join(f"- {check}" for check in export.get("checks", ())) or "- none"
    return f"{_fenced(export['command'])}\n\nChecked when it was written, and passed:\n\n{checks}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bullets(rows: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {_code(value) or 'unknown'}" for name, value in rows.items())


def _code(value: Any) -> str:
    """Format a value as Markdown code on one line; empty for None."""
    if value is None:
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)}`"


def _fenced(*lines: str, language: str = "sh") -> str:
    return "\n".join([f"```{language}", *lines, "```"])


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
    manifest: dict[str, Any] = {
        "target": target.info.identity,
        "tied_to_target": list(head.tied_to_target),
        "metrics": dict(metrics or {}),
        **made_with(),
    }
    return save_head(directory, head, manifest, model_card(head.kind, {"head": head_fields(head), **manifest}))

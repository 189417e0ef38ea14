"""Model cards of heads and exports: Markdown templates filled from a manifest, `measured.json` and an export's facts.

A card never says more than these: what they lack is written as unknown. `measured.json` lies beside the files of the
training and is not part of the head: `eval bench --card` writes it, and the card anew.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from draftsmith.data.console import markdown_lines
from draftsmith.data.heads.directory import class_of, config_from_json, head_config, head_fields, save_head
from draftsmith.data.store.files import write_json, write_text
from draftsmith.data.store.manifest import file_sha256, git_commit, package_versions
from draftsmith.data.store.reading import read_object
from draftsmith.modules.drafters import head_class, learned
from draftsmith.modules.drafters.base import DraftHead, HeadCard
from draftsmith.modules.formats import formats_of, hf_assisted
from draftsmith.modules.formats.acceptance import PREDICTED, uses_of
from draftsmith.modules.targets.base import CausalLM

MEASURED, CARD, WEIGHTS = "measured.json", "README.md", "model.safetensors"
ROW = {"tau": (float, None), "speedup": (float, None), "prompts?": int, "tokens?": int}
MEASURED_SHAPE = {
    "head_sha256": str,
    "methods": [{"method": str, "temperature": float, **ROW, "by_task?": {"*": ROW}}],
    **{"settings": dict, "prompts": dict, "clock": str, "hardware": dict, "date": str},
}
# Library that the hub lists an export's format with, if not the format's own name.
LIBRARIES = {hf_assisted.NAME: "transformers"}
ACCEPTANCE_HEAD = (
    "Predicts from a drafter's last hidden state whether the target will keep a drafted token (SpecDec++, Huang et al. "
    "2024). It stops drafts that are likely to fail."
)
DRAFT_MODEL = HeadCard(
    "Draft model",
    "A draft model for transformers' assisted generation, with the settings that were measured to suit it.",
    ("assisted-generation",),
    f"{hf_assisted.NAME}:k=5",
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
    "top3": "share where the target's choice is among the head's first three",
    "tau": "emitted tokens per target call, greedy chains; end tokens are ignored where tau_behind_end is there",
    "tau_behind_end": "share of those tokens that come behind an end token: the target serves no such text",
}
UNKNOWN = "unknown"

PAGE = """\
---
{front_matter}---

# {title}

{what}

{facts}

{sections}

## How to use it

{usage}

## Licence

{licence} Other licences apply to {sources}. This program does not know them: look them up before you share it.

## Versions

{versions}
"""
HEAD_SECTIONS = """\
## Target and tokenizer

{target}

## Data

{data}

## Training

{training}

## Measured on held-out samples

{metrics}

## tau by task

{tau}

## Calibration

{calibration}
"""
COUNTING_RULE = """\
tau is emitted tokens per target call under {modes}. Emitted tokens are cut at the end token (kept) and at \
{max_new_tokens} before they are counted; the token that the target adds to a draft (the bonus token) is one of them; \
the prefill is one of the target's calls. Over prompts it is a ratio of sums, never a mean of ratios. Speed-up is \
tokens per second of {clock}, over autoregressive decoding by the same engine in the same run.

Prompts: {source}, {count}, sha256 `{sha256}`. Machine: {machine}, {dtype} on {device}, {num_threads} thread(s), \
{batch_size} prompt(s) at a time, {repeats} repeat(s). Date: {date}, commit {commit}."""


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
    export: of an exported directory: `format`, `command` (serves it), `checks` (passed), `head` (path, sha256),
        `weights` (dtype) and `notes`.
    """
    # Everything may be missing: an imported head has no config, a script's head no data.
    head, config, imported, models, metrics, identity = (
        manifest.get(name) or {} for name in ("head", "config", "imported", "models", "metrics", "target")
    )
    drafts = kind in learned()
    unknown = "unknown: the head was imported" if imported else UNKNOWN
    # An acceptance head reads the hidden states of a draft model, or of the target of a drafting head.
    drafter = next((name for name in learned() if name in identity), None)
    paths = {flag: config.get(flag) or imported.get(flag) for flag in ("target", "draft")}
    # Only a benchmark may know the target of an acceptance head.
    target = paths["target"] or (measured or {}).get("settings", {}).get("target")
    reads = paths["target" if drafts else "draft"]
    # Options that name the models in a command; what is not known is left to the reader in capitals.
    options = f"--target {shlex.quote(target or 'TARGET')} --draft "
    options += "DIR" if drafts else f"{shlex.quote(reads or 'DRAFT')} --acceptance DIR"
    about = head_class(kind).card(head) if drafts else _acceptance_card(head, drafter)

    # What it is, and where an imported or exported head comes from.
    lines = list(about.shape)
    if imported:
        source = {key: value for key, value in imported.items() if key not in ("producer", "notes")}
        lines.append(f"- imported from {imported.get('producer', 'an unknown producer')}: {_code(source)}")
        lines += [f"- {note}" for note in imported.get("notes", ())]
    if export is not None:
        origin = export["head"]
        lines.append(f"- made from the head {_code(origin.get('path'))}, weights' sha256 `{origin['sha256']}`")
        lines += [f"- weights in {export['weights']}", *(f"- {note}" for note in export.get("notes", ()))]

    # Identities of the models that it was trained with.
    name = "target" if drafts else head_class(drafter).card({}).title if drafter else "draft"
    target_rows = {f"{name}, whose hidden states it reads": reads, f"identity of the {name}": identity}
    if not drafts:
        target_rows["identity of the target, whose verdicts it predicts"] = models.get("target")
    target_rows |= {"tokenizer": models.get("tokenizer"), "chat template": models.get("chat_template")}
    checked = "Identities are hashes of content; `draftsmith` refuses other models."
    unchecked = "No identity is recorded: `draftsmith` takes any model of its width and vocabulary."

    # YAML's safe writer takes JSON values only.
    options_used = {name: value for name, value in config.items() if value not in (None, "")}
    options_used = json.loads(json.dumps(options_used, default=str))
    training = _shell(yaml.safe_dump(options_used, sort_keys=False).strip(), language="yaml")
    training = f"{manifest.get('step') or 0:,} steps of `draftsmith train {kind}`:\n\n{training}"
    calibration = "None: it proposes tokens, and the target's verdict does not depend on how sure it was of them."
    tau = f"draftsmith eval bench {options} --methods {about.method} --prompts FILE --output runs/bench --card"
    sections = HEAD_SECTIONS.format(
        target=f"{_bullets(target_rows, unknown)}\n\n{checked if identity else unchecked}",
        data=_data_section(manifest) or f"{unknown.capitalize()}.",
        training=training if manifest.get("step") else f"{unknown.capitalize()}.",
        metrics=_metrics_section(metrics, about, manifest.get("step"))
        or (f"{unknown.capitalize()}." if imported else "Not validated yet."),
        tau=_tau_section(measured) or f"Not measured yet. This measures it and writes it here:\n\n{_shell(tau)}",
        calibration=calibration if drafts else _calibration_section(head, metrics, manifest.get("sampling"), unknown),
    )
    # Commands that try the head and export it to every format that holds it.
    usage = f"draftsmith decode PROMPT {options} --method {about.method}"
    formats = formats_of(kind) if head else []
    settings = config_from_json(class_of(kind).Config, head) if formats else None
    export_target = f" --target {shlex.quote(target or 'TARGET')}" if drafts else ""
    exports = [
        f"draftsmith export --head DIR --format {format.name} --output DIR-{format.name}{export_target}"
        for format in formats
        if format.holds(settings)
    ]
    states = _code(reads) or f"the {'target' if drafts else 'draft'}"
    others = "the data" if drafts else "the target, whose verdicts it predicts, and the data"
    return _page(
        about,
        base_model=target if drafter else reads,
        licence=manifest.get("license") or config.get("license"),
        export=export,
        facts=lines,
        sections=sections,
        usage=f"DIR is this directory.\n\n{_shell(usage, *exports)}" if export is None else _export_section(export),
        sources=f"{states}, whose hidden states it was made from, and to {others}",
        versions=_versions(manifest, unknown, export is not None),
    )


def draft_model_card(manifest: Mapping[str, Any], export: Mapping[str, Any]) -> str:
    """Render the card of an exported draft model. export: as of `model_card`, with `target` and `draft` as passed."""
    models = manifest.get("models") or {}
    rows = {flag: export.get(flag) for flag in ("target", "draft")}
    rows |= {"identity of the draft": models.get("draft"), "tokenizer": models.get("tokenizer")}
    bench = f"draftsmith eval bench --target TARGET --draft DIR --methods {DRAFT_MODEL.method} --prompts FILE"
    return _page(
        DRAFT_MODEL,
        base_model=None,
        licence=manifest.get("license"),
        export=export,
        facts=[f"- {note}" for note in export.get("notes", ())],
        sections=f"## Target and tokenizer\n\n{_bullets(rows, UNKNOWN)}\n\n## tau by task\n\n"
        f"Not measured yet. This measures it:\n\n{_shell(f'{bench} --output runs/bench')}",
        usage=_export_section(export, "python"),
        sources="the draft model",
        versions=_versions(manifest, UNKNOWN, True),
    )


def _page(
    about: HeadCard,
    base_model: str | None,
    licence: str | None,
    export: Mapping[str, Any] | None,
    facts: Sequence[str],
    **sections: str,
) -> str:
    """Fill the page, with the front matter by which the model hub lists a model."""
    format = export["format"] if export else "draftsmith"
    # The hub takes `other` with a name for a licence that it does not list, and hub ids only as base models.
    fields: dict[str, Any] = {
        **({"license": licence} if licence else {"license": "other", "license_name": "not-stated"}),
        "library_name": LIBRARIES.get(format, format),
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draftsmith", *about.tags],
    }
    base = (base_model or "").partition("@")[0]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists():
        fields["base_model"] = base
    # Templates are filled once: braces in the values stay as they are.
    page = PAGE.format(
        front_matter=yaml.safe_dump(fields, sort_keys=False),
        title=f"{about.title}, exported for {format}" if export else about.title,
        what=about.what,
        facts="\n".join(facts),
        licence=f"`{licence}`, as stated when it was made." if licence else "Not stated.",
        **sections,
    )
    return re.sub(r"\n{3,}", "\n\n", page)


def _acceptance_card(head: Mapping[str, Any], drafter: str | None) -> HeadCard:
    """Describe an acceptance head as drafters describe themselves in `DraftHead.card`."""
    shape: tuple[str, ...] = ()
    state = head.get("state", "after")
    if head:
        blocks = f"{head['num_blocks']} {'tied ' if head.get('tied') else ''}residual block(s)"
        layers = f"{blocks} of width {head.get('width') or head['hidden_size']}, then one logit"
        if head.get("activation") == "relu":
            layers = f"a rectified layer, {layers}; the features go straight to it"
        features = f"- features: {', '.join(head.get('features') or ('none',))}"
        shape = (
            f"- {layers}",
            features,
            f"- predicts for {PREDICTED}",
            *(f"- {use}" for use in uses_of(state).values()),
        )
    option = f":drafter={drafter}" if drafter else ""
    method = f"specdec++:h=0.7{option}" if state == "after" else f"online:head=on{option}"
    return HeadCard("Acceptance head", ACCEPTANCE_HEAD, ("specdec++",), method, shape=shape)


def _data_section(manifest: Mapping[str, Any]) -> str:
    config, inputs = manifest.get("config") or {}, manifest.get("inputs") or {}
    lines = [
        f"- {verb}: {_code(config.get(name)) or 'unknown path'}, digest `{inputs[name]}`"
        for name, verb in (("data", "trained on"), ("val", "validated on"), ("init", "started from"))
        if name in inputs
    ]
    for name, part in (manifest.get("samples") or {}).items():
        line = f"- {name}: {part['samples']:,} samples, {part['tokens']:,} tokens"
        # A sample of rollouts is a block of drafted tokens: the number of samples says nothing.
        if manifest.get("labels") == "rollout":
            line = f"- {name}: {part['tokens']:,} tokens of labelled drafts"
        if "answers" in part:
            median = f"median {part['tokens_p50']:,.0f} tokens"
            line += f"; {part['answers']:,} responses of {part['answer_tokens']:,} tokens, {median}"
        lines.append(line)
    return "\n".join(lines)


def _metrics_section(metrics: Mapping[str, float], about: HeadCard, step: int | None) -> str:
    rows = []
    for name, value in sorted(metrics.items()):
        meaning = about.metrics.get(name) or METRICS.get(name, "")
        if name.startswith("agreement_"):
            number = name.removeprefix("agreement_")
            meaning = (
                f"share of drafts whose token {number} is the target's choice, of those that were right until then"
            )
        rows.append(f"| {name} | {value:.4g} | {meaning} |")
    table = "\n".join(["| metric | value | meaning |", "|---|---|---|", *rows])
    return f"After step {step}:\n\n{table}" if rows else ""


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
    table = "\n".join(markdown_lines(("task", "method", "prompts", "tokens", "tau", "speed-up"), rows))

    settings, prompts, hardware = measured["settings"], measured["prompts"], measured["hardware"]
    cuts = f"top-k {settings['top_k'] or 'all'}, top-p {settings['top_p']:g}"
    modes = [f"sampling at temperature {t:g}, {cuts}" if t else "greedy decoding" for t in temperatures]
    # A measurement means nothing without its rule, prompts and machine.
    names = ("max_new_tokens", "dtype", "device", "num_threads", "batch_size", "repeats")
    rule = COUNTING_RULE.format(
        modes=" and under ".join(modes),
        clock="CPU time" if measured["clock"] == "cpu" else "wall time",
        source=_code(prompts["source"]),
        count=prompts["count"],
        sha256=prompts["sha256"],
        machine=hardware.get("gpu") or hardware.get("cpu", UNKNOWN),
        date=measured["date"],
        commit=measured.get("git_commit") or UNKNOWN,
        **{name: settings[name] for name in names},
    )
    return f"{table}\n\n{rule}"


def _calibration_section(head: Mapping[str, Any], metrics: Mapping[str, float], sampling: Any, unknown: str) -> str:
    """Describe how an acceptance head's output becomes a probability, where that holds, and how good it was."""
    lines = [f"The sampling that its labels were made with is {unknown}."]
    if sampling:
        lines = [f"Labels and calibration hold for this sampling only: {_code(sampling)}."]
    if head:
        w_acc, w_rej, (scale, shift) = head["w_acc"], head["w_rej"], head.get("calibration", (1.0, 0.0))
        lines.append(
            f"The loss weighs accepted tokens by {w_acc:g} and rejected ones by {w_rej:g}. The calibrated logit is "
            f"scale * (logit + log(w_rej / w_acc)) + shift; the logarithm is {math.log(w_rej / w_acc):.4g}, scale "
            f"{scale:.4g}, shift {shift:.4g}."
        )
    kinds = {"ece": "with the correction for the weights alone", "ece_platt": "with scale and shift, cross-fitted"}
    errors = [f"{metrics[name]:.4g} {kind}" for name, kind in kinds.items() if name in metrics]
    return "\n\n".join([*lines, f"Calibration error on held-out tokens: {', '.join(errors) or unknown}."])


def _export_section(export: Mapping[str, Any], language: str = "sh") -> str:
    checks = "\n".join(f"- {check}" for check in export.get("checks", ())) or "- none"
    return f"{_shell(export['command'], language=language)}\n\nChecked when it was written, and passed:\n\n{checks}"


def _versions(manifest: Mapping[str, Any], unknown: str, exported: bool) -> str:
    packages, line = manifest.get("packages") or {}, f"{unknown.capitalize()}."
    if packages:
        names = ("draftsmith", "torch", "transformers")
        line = ", ".join(f"{name} {packages.get(name) or 'unknown (not installed)'}" for name in names)
    if manifest.get("git_commit"):
        line += f"; commit {manifest['git_commit']}"
    return line if exported else f"{line}\n\n`manifest.json` holds everything, with hashes."


def _bullets(rows: Mapping[str, Any], unknown: str) -> str:
    return "\n".join(f"- {name}: {_code(value) or unknown}" for name, value in rows.items())


def _code(value: Any) -> str:
    """Format a value as Markdown code on one line; empty for None and {}."""
    if value is None or value == {}:
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)}`"


def _shell(*lines: str, language: str = "sh") -> str:
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
    directory = Path(directory)
    if not (directory / MEASURED).exists():
        return None
    remedy = "Delete it, or measure again: eval bench --card."
    sha256 = read_object(directory / MEASURED, {"head_sha256": str}, remedy)["head_sha256"]
    # Weights that were trained further have not been measured.
    if sha256 != file_sha256(directory / WEIGHTS):
        return None
    return read_object(directory / MEASURED, MEASURED_SHAPE, remedy)


def save(head: DraftHead, directory: str | Path, target: CausalLM, metrics: Mapping[str, float] | None = None) -> Path:
    """Save a head that a script trained as a head directory with a model card, which every command takes.

    target: the model it drafts for, whose identity is recorded. metrics: measured numbers for the card. The card says
    that data and settings are unknown.
    """
    manifest: dict[str, Any] = {
        "target": target.info.identity,
        "of_target": list(head.of_target),
        "metrics": dict(metrics or {}),
        "packages": package_versions(),
        "git_commit": git_commit(),
    }
    return save_head(directory, head, manifest, model_card(head.kind, {"head": head_fields(head), **manifest}))

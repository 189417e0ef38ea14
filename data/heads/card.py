"""The model card of a head or of an export: what it is, what it was made from, what was measured, how to use it.

Pure: from a head's manifest (train/fit.py writes it, an import writes a shorter one), its `measured.json`
(data/heads/measured.py) and what an export says of itself. A card never says more than these do: what they lack is
unknown. What a learned drafter is, it says itself (`DraftHead.card`).
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from draftsmith.data.heads import acceptance_card
from draftsmith.data.heads.directory import class_of, config_from_json
from draftsmith.data.heads.markdown import code, markdown_lines, sentence, shell
from draftsmith.data.heads.metrics import metric_help
from draftsmith.modules.drafters import head_class, learned
from draftsmith.modules.drafters.base import HeadCard
from draftsmith.modules.formats import formats_of, hf_assisted

# Library that an export's format belongs to, as the model hub names it, where that is not the format's own name.
LIBRARIES = {hf_assisted.NAME: "transformers"}
# Settings that every training has and that decide its result, in the order in which a reader asks for them.
SETTINGS = (
    *("features", "feature_dtype", "epochs", "max_steps", "batch_size", "tokens_per_batch", "max_length"),
    *("optimizer", "lr", "schedule"),
    *("warmup_share", "min_lr_share", "weight_decay", "betas", "clip", "precision", "model_dtype", "val_share", "seed"),
)
UNKNOWN, IMPORTED = "unknown", "unknown: the head was imported"
DRAFT_MODEL = HeadCard(
    "Draft model",
    "A draft model for transformers' assisted generation, with the settings that were measured to suit it.",
    ("assisted-generation",),
    f"{hf_assisted.NAME}:k=5",
)


def model_card(
    kind: str,
    manifest: Mapping[str, Any],
    *,
    measured: Mapping[str, Any] | None = None,
    export: Mapping[str, Any] | None = None,
) -> str:
    """The card of a head.

    kind: what `train` calls it.
    manifest: its `manifest.json`, with the `head` of its `config.json` where that is at hand. All of it is optional: an
        imported head has `imported` (producer, path, ...) in the place of config, step and metrics.
    measured: the content of `measured.json`.
    export: of an exported directory: `format`; `command`, which serves it; `checks`, lines that say what was checked
        and passed; `head`, `path` and `sha256` of what it was made from; `weights`, their type; `notes`, lines.
    """
    card = HeadFacts(kind, manifest, measured, export)
    calibration = "None: it proposes tokens, and the target's verdict does not depend on how sure it was of them."
    if not card.drafts:
        calibration = acceptance_card.calibration(card.manifest, card.unknown)
    sections = {
        "Target and tokenizer": target_section(card),
        "Data": data_section(card),
        "Training": training_section(card),
        "Measured on held-out samples": held_out_section(card),
        "tau by task": tau_section(card),
        "Calibration": calibration,
        "How to use it": usage_section(card) if export is None else export_section(export),
        "Licence": licence_section(card),
        "Versions": versions(manifest, card.unknown, exported=export is not None),
    }
    lines = [*card.about.shape, *origin(card)]
    if card.head and not card.drafts:
        lines.append(acceptance_card.inputs_table(card.head))
    return page(card.about, lines, sections, card.license, card.base_model, export)


def draft_model_card(manifest: Mapping[str, Any], export: Mapping[str, Any]) -> str:
    """The card of a draft model that was exported; the model's own says the rest.

    export: as of `model_card`, with `target` and `draft` as they were given, and no head.
    """
    models = manifest.get("models") or {}
    known = {
        **{flag: export.get(flag) for flag in ("target", "draft")},
        "identity of the draft": models.get("draft"),
        "tokenizer": models.get("tokenizer"),
    }
    bench = f"draftsmith eval bench --target TARGET --draft DIR --methods {DRAFT_MODEL.method} --prompts FILE"
    sections = {
        "Target and tokenizer": "\n".join(f"- {name}: {code(value) or UNKNOWN}" for name, value in known.items()),
        "tau by task": f"Not measured yet. This measures it:\n\n{shell(f'{bench} --output runs/bench')}",
        "How to use it": export_section(export, "python"),
        "Licence": f"{licence_stated(manifest.get('license'))} It is that of the draft model, which this program does "
        "not know: look it up before you share it.",
        "Versions": versions(manifest, UNKNOWN, exported=True),
    }
    lines = [f"- {note}" for note in export.get("notes", ())]
    return page(DRAFT_MODEL, lines, sections, manifest.get("license"), None, export)


@dataclass(frozen=True)
class HeadFacts:
    """What is known of a head, and what it has to do with. Fields as of `model_card`."""

    kind: str
    manifest: Mapping[str, Any]
    measured: Mapping[str, Any] | None
    export: Mapping[str, Any] | None

    @cached_property
    def about(self) -> HeadCard:
        if self.drafts:
            return head_class(self.kind).card(self.head)
        return acceptance_card.about(self.head, self.drafter)

    @property
    def drafts(self) -> bool:
        return self.kind in learned()

    @cached_property
    def drafter(self) -> str | None:
        """Kind of the drafting head whose hidden states an acceptance head reads; None for a draft model's."""
        return next((kind for kind in learned() if kind in (self.manifest.get("target") or {})), None)

    @property
    def head(self) -> Mapping[str, Any]:
        return self.manifest.get("head") or {}

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings of the training; none for an imported head."""
        return self.manifest.get("config") or {}

    @property
    def imported(self) -> Mapping[str, Any] | None:
        return self.manifest.get("imported")

    @property
    def unknown(self) -> str:
        """What is said in the place of something that is not known."""
        return UNKNOWN if self.imported is None else IMPORTED

    def known(self, value: Any) -> str:
        """The value as code, or what is said where it is not known."""
        return code(value) or self.unknown

    @property
    def license(self) -> str:
        """Empty where nobody has stated one."""
        return self.manifest.get("license") or self.config.get("license") or ""

    def recorded(self, flag: str) -> str | None:
        """Path or hub id that a training or an import was given for a model."""
        return self.config.get(flag) or (self.imported or {}).get(flag)

    @property
    def target(self) -> str | None:
        """Path or hub id of the target: of an acceptance head only a benchmark may know it."""
        return self.recorded("target") or (self.measured or {}).get("settings", {}).get("target")

    @property
    def reads(self) -> str | None:
        """Path or hub id of what gives the hidden states that the head reads."""
        if self.drafts:
            return self.recorded("target")
        return self.recorded("draft")

    @property
    def base_model(self) -> str | None:
        """Path or hub id of the model that the hub is to list the head with."""
        return self.target if self.drafter else self.reads

    @property
    def models_words(self) -> str:
        """Words of a command line that name the models; what is not known is left to the reader, in capitals."""
        target = f"--target {shlex.quote(self.target or 'TARGET')}"
        if self.drafts:
            return f"{target} --draft DIR"
        return f"{target} --draft {shlex.quote(self.reads or 'DRAFT')} --acceptance DIR"


def page(
    about: HeadCard,
    lines: list[str],
    sections: Mapping[str, str],
    license: str | None,
    base_model: str | None,
    export: Mapping[str, Any] | None,
) -> str:
    """Markdown, after a front matter by which the model hub finds a model. The hub takes `other` with a name for a
    licence that it does not list, and hub ids only as base models."""
    format = export["format"] if export else "draftsmith"
    fields: dict[str, Any] = {
        **({"license": license} if license else {"license": "other", "license_name": "not-stated"}),
        "library_name": LIBRARIES.get(format, format),
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draftsmith", *about.tags],
    }
    base = (base_model or "").partition("@")[0]
    # OWNER/NAME that is no directory here is what `data.models.model_directory` fetches from the hub.
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists():
        fields["base_model"] = base
    matter = f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"
    heading = f"# {about.title}, exported for {format}" if export else f"# {about.title}"
    parts = [matter, heading, about.what, "\n".join(lines)]
    parts += [f"## {name}\n\n{section}" for name, section in sections.items()]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def origin(card: HeadFacts) -> list[str]:
    """Where an imported or exported head is from."""
    lines = []
    if card.imported is not None:
        source = {key: value for key, value in card.imported.items() if key not in ("producer", "notes")}
        lines.append(f"- imported from {card.imported.get('producer', 'an unknown producer')}: {code(source)}")
        lines += [f"- {note}" for note in card.imported.get("notes", ())]
    if card.export is not None:
        head = card.export["head"]
        lines.append(f"- made from the head {code(head.get('path'))}, weights' sha256 `{head['sha256']}`")
        lines.append(f"- weights in {card.export['weights']}")
        lines += [f"- {note}" for note in card.export.get("notes", ())]
    return lines


def target_section(card: HeadFacts) -> str:
    name, models = "target" if card.drafts else "draft", card.manifest.get("models") or {}
    if card.drafter and not card.drafts:
        name = head_class(card.drafter).card({}).title
    lines = [
        f"- {name}, whose hidden states it reads: {card.known(card.reads)}",
        f"- identity of the {name}: {card.known(card.manifest.get('target'))}",
    ]
    if not card.drafts:
        lines.append(f"- identity of the target, whose verdicts it predicts: {card.known(models.get('target'))}")
    lines.append(f"- tokenizer: {card.known(models.get('tokenizer'))}")
    lines.append(f"- chat template: {card.known(models.get('chat_template'))}")
    refused = "Identities are hashes of content; `draftsmith` refuses other models."
    taken = "No identity is recorded: `draftsmith` takes any model of its width and vocabulary."
    return "\n".join([*lines, "", refused if card.manifest.get("target") else taken])


def data_section(card: HeadFacts) -> str:
    inputs, counts = card.manifest.get("inputs") or {}, card.manifest.get("samples") or {}
    lines = [
        f"- {said}: {code(card.config.get(name)) or 'unknown path'}, digest `{inputs[name]}`"
        for name, said in (("data", "trained on"), ("val", "validated on"))
        if name in inputs
    ]
    # Of labelled rounds a sample is a block of drafted tokens, which says nothing.
    rounds = card.manifest.get("labels") == "rollout"
    for name, part in counts.items():
        size = f"{part['tokens']:,} tokens"
        said = f"{size} of labelled drafts" if rounds else f"{part['samples']:,} samples, {size}"
        lines.append(f"- {name}: {said}{answers_text(part)}")
    if "init" in inputs:
        lines.append(f"- started from: {code(card.config.get('init'))}, weights' sha256 `{inputs['init']}`")
    return "\n".join(lines) or sentence(card.unknown)


def answers_text(part: Mapping[str, Any]) -> str:
    """What was learned of them, where it is recorded (data/text/answers.py)."""
    if "answers" not in part:
        return ""
    few, middle, many = (f"{part[f'tokens_p{rank}']:,.0f}" for rank in (5, 50, 95))
    return (
        f"; {part['answers']:,} answers of {part['answer_tokens']:,} tokens ({few}, {middle} and {many} an answer at "
        f"the 5th, 50th and 95th percentile; {part['early_share']:.0%} among the first five of an answer)"
    )


def training_section(card: HeadFacts) -> str:
    config = dict(card.config)
    # Of two settings of which one decides, the other is not shown.
    for decides, other in (("max_steps", "epochs"), ("tokens_per_batch", "batch_size")):
        if decides in config:
            config.pop(other if config[decides] else decides, None)
    own: tuple[str, ...] = acceptance_card.SETTINGS
    if card.drafts:
        fields = dataclasses.fields(head_class(card.kind).Settings)
        own = tuple(field.name for field in fields if not field.metadata.get("volatile"))
    shown = dict.fromkeys(("init", *own, *SETTINGS))
    rows = [(f"`{name}`", code(config[name])) for name in shown if config.get(name) is not None]
    if not rows:
        return sentence(card.unknown)
    step = card.manifest.get("step")
    said = f"Settings of `draftsmith train {card.kind}` that decide the result"
    return (f"{step:,} steps. {said}:\n\n" if step else "") + "\n".join(markdown_lines(("setting", "value"), rows))


def held_out_section(card: HeadFacts) -> str:
    metrics = card.manifest.get("metrics") or {}
    if not metrics:
        return sentence(card.unknown) if card.imported is not None else "Not validated yet."
    help = {name: card.about.metrics.get(name) or metric_help(name) for name in metrics}
    rows = "\n".join(f"| {name} | {value:.4g} | {help[name]} |" for name, value in sorted(metrics.items()))
    return f"After step {card.manifest.get('step')}:\n\n| metric | value | meaning |\n|---|---|---|\n{rows}"


def tau_section(card: HeadFacts) -> str:
    measured = card.measured
    if measured is None:
        words = f"{card.models_words} --methods {card.about.method} --prompts FILE --output runs/bench --card"
        return f"Not measured yet. This measures it and writes it here:\n\n{shell(f'draftsmith eval bench {words}')}"
    rows = []
    several = len(measured_temperatures(measured)) > 1
    for row in measured["methods"]:
        label = f"{row['method']}, temperature {row['temperature']:g}" if several else row["method"]
        for task, part in {"all": row, **(row.get("by_task") or {})}.items():
            tau, speedup = f"{part['tau']:.3f}", f"{part['speedup']:.2f}x"
            rows.append((task, label, str(part["prompts"]), f"{part['tokens']:,}", tau, speedup))
    headings = ("task", "method", "prompts", "tokens", "tau", "speed-up")
    return "\n".join([*markdown_lines(headings, rows), "", counting_rule(measured)])


def measured_temperatures(measured: Mapping[str, Any]) -> list[float]:
    """The temperatures that were measured; earlier measurements have one, in their settings."""
    single = measured["settings"]["temperature"]
    return sorted({row.get("temperature", single) for row in measured["methods"]})


def counting_rule(measured: Mapping[str, Any]) -> str:
    """What tau counts, and how the numbers were taken."""
    settings, prompts = measured["settings"], measured["prompts"]
    kept = f"top-k {settings['top_k'] or 'all'}, top-p {settings['top_p']:g}"
    modes = [
        f"sampling at temperature {temperature:g}, {kept}" if temperature else "greedy decoding"
        for temperature in measured_temperatures(measured)
    ]
    clock = "CPU time" if measured["clock"] == "cpu" else "wall time"
    machine = measured["hardware"].get("gpu") or measured["hardware"].get("cpu", "unknown")
    rule = (
        f"tau is emitted tokens per target call under {' and under '.join(modes)}. Emitted tokens are cut at the end "
        f"token (kept) and at {settings['max_new_tokens']} before they are counted; the token that the target adds to "
        "a draft (the bonus token) is one of them; the prefill is one of the target's calls. Over prompts it is a "
        f"ratio of sums, never a mean of ratios. Speed-up is tokens per second of {clock}, over autoregressive "
        "decoding by the same engine in the same run."
    )
    how = (
        f"Prompts: {code(prompts['source'])}, {prompts['count']}, sha256 `{prompts['sha256']}`. Machine: {machine}, "
        f"{settings['dtype']} on {settings['device']}, {settings['num_threads']} thread(s), {settings['batch_size']} "
        f"prompt(s) at a time, {settings['repeats']} repeat(s). Date: {measured['date']}, commit "
        f"{measured.get('git_commit') or 'unknown'}."
    )
    return f"{rule}\n\n{how}"


def usage_section(card: HeadFacts) -> str:
    """Command lines; DIR is this directory."""
    decode = f"draftsmith decode PROMPT {card.models_words} --method {card.about.method}"
    target = f" --target {shlex.quote(card.target or 'TARGET')}" if card.drafts else ""
    formats = formats_of(card.kind) if card.head else []
    config = config_from_json(class_of(card.kind).Config, card.head) if formats else None
    exports = [
        f"draftsmith export --head DIR --format {format.name} --output DIR-{format.name}{target}"
        for format in formats
        if format.holds(config)
    ]
    return f"DIR is this directory.\n\n{shell(decode, *exports)}"


def export_section(export: Mapping[str, Any], language: str = "sh") -> str:
    """How an export is served. language: of its command."""
    checks = "\n".join(f"- {check}" for check in export.get("checks", ())) or "- none"
    return f"{shell(export['command'], language=language)}\n\nChecked when it was written, and passed:\n\n{checks}"


def licence_section(card: HeadFacts) -> str:
    model = code(card.reads) or f"the {'target' if card.drafts else 'draft'}"
    others = "of the data" if card.drafts else "of the target, whose verdicts it predicts, and of the data"
    return (
        f"{licence_stated(card.license)} What it may be used for depends on the licence of {model}, whose hidden "
        f"states it was made from, and on those {others}. This program knows none of them: look them up before you "
        "share the head."
    )


def licence_stated(license: str | None) -> str:
    return f"`{license}`, as stated when it was made." if license else "Not stated."


def versions(manifest: Mapping[str, Any], unknown: str, exported: bool) -> str:
    packages = manifest.get("packages") or {}
    names = ("draftsmith", "torch", "transformers")
    line = ", ".join(f"{name} {packages.get(name) or 'unknown (not installed)'}" for name in names)
    line = line if packages else sentence(unknown)
    if manifest.get("git_commit"):
        line += f"; commit {manifest['git_commit']}"
    return line if exported else f"{line}\n\n`manifest.json` holds everything, with hashes."

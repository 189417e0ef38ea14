"""The model card of a head or of an export: what it is, what it was made from, what was measured, how to use it.

Pure: from a head's manifest (train/fit.py writes it, an import writes a shorter one), its `measured.json`
(data/heads/measured.py) and what an export says of itself. A card never says more than these do: what they lack is
unknown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftsmith.data.heads.acceptance_card import calibration_text, described, export_formats, inputs_table, method_of
from draftsmith.data.heads.markdown import code, markdown_lines, sentence, shell
from draftsmith.data.heads.metric_help import meaning

WHAT = {
    "acceptance": (
        "Acceptance head",
        "Predicts from a drafter's last hidden state whether the target will keep a drafted token (SpecDec++, Huang et "
        "al. 2024). It stops drafts that are likely to fail.",
    ),
    "eagle": (
        "EAGLE head",
        "Drafts tokens from the target's own features (EAGLE, Li et al. 2024). Embedding and lm_head are the target's "
        "and not in this directory.",
    ),
    "hf-assisted": (
        "Draft model",
        "A draft model for transformers' assisted generation, with the settings that were measured to suit it.",
    ),
}
TAGS = {"acceptance": ["specdec++"], "eagle": ["eagle"], "hf-assisted": ["assisted-generation"]}
# Library that an export's format belongs to, as the model hub names it.
LIBRARIES = {"vllm": "vllm", "sglang": "sglang", "hf-assisted": "transformers"}
# Settings of a training that decide its result, in the order in which a reader asks for them.
SETTINGS = (
    *("init", "num_layers", "rope", "num_blocks", "tied", "state", "judges", "w_acc", "w_rej", "mix", "calibrate"),
    *("features", "feature_dtype", "feature_weight", "token_weight", "noise", "unroll", "unroll_after", "unroll_decay"),
    *("epochs", "max_steps", "batch_size", "tokens_per_batch", "max_length", "optimizer", "lr", "schedule"),
    *("warmup_share", "min_lr_share", "weight_decay", "betas", "clip", "precision", "model_dtype", "val_share", "seed"),
)
NOT_STATED = "not stated"
IMPORTED = "unknown: the head was imported"


@dataclass(frozen=True)
class Facts:
    """What a card is made from. kind: of head. The others as `model_card` is given them."""

    kind: str
    manifest: Mapping[str, Any]
    measured: Mapping[str, Any] | None
    export: Mapping[str, Any] | None

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
        return IMPORTED if self.imported is not None else "unknown"

    @property
    def read_model(self) -> str | None:
        """Path or hub id of what gives the hidden states that the head reads."""
        return self.config.get(self.reads) or (self.imported or {}).get(self.reads)

    @property
    def reads(self) -> str:
        """The flag that names it."""
        if self.kind != "acceptance":
            return "target"
        return "eagle" if self.by_eagle else "draft"

    @property
    def by_eagle(self) -> bool:
        """An acceptance head that reads an EAGLE head's hidden states."""
        return self.kind == "acceptance" and "eagle" in (self.manifest.get("target") or {})

    @property
    def head(self) -> Mapping[str, Any]:
        return self.manifest.get("head") or {}

    @property
    def target(self) -> str | None:
        """Path or hub id of the target: of an acceptance head only a benchmark knows it."""
        measured = (self.measured or {}).get("settings", {}).get("target")
        return self.config.get("target") or (self.imported or {}).get("target") or measured

    @property
    def license(self) -> str:
        """Empty where nobody has stated one."""
        return self.manifest.get("license") or self.config.get("license") or ""


def model_card(
    kind: str,
    manifest: Mapping[str, Any],
    *,
    measured: Mapping[str, Any] | None = None,
    export: Mapping[str, Any] | None = None,
) -> str:
    """Markdown, after a front matter as the model hub reads it.

    kind: acceptance, eagle, or hf-assisted for an export of a draft model.
    manifest: the head's `manifest.json`, with the `head` of its `config.json` where that is at hand. All of it is
        optional: an imported head has `imported` (producer, path, ...) in the place of config, step and metrics.
    measured: the content of `measured.json`.
    export: of an exported directory: `format`; `command`, which serves it; `checks`, lines that say what was checked
        and passed; `head`, `path` and `sha256` of what it was made from; `weights`, their type; `notes`, lines. For
        hf-assisted `target` and `draft`, as given, and no head.
    """
    facts = Facts(kind, manifest, measured, export)
    title, what = WHAT[kind]
    heading = f"{title}, exported for {export['format']}" if export else title
    parts = [front_matter(facts), f"# {heading}\n\n{what}", *shape(facts)]
    wanted = SECTIONS if kind != "hf-assisted" else {name: SECTIONS[name] for name in OF_A_DRAFT_MODEL}
    parts += [f"## {name}\n\n{section(facts)}" for name, section in wanted.items()]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def front_matter(facts: Facts) -> str:
    """The fields by which the model hub finds a model. It takes `other` with a name for a licence that it does not
    list, and hub ids only as base models."""
    stated = {"license": facts.license} if facts.license else {"license": "other", "license_name": "not-stated"}
    export_format = facts.export["format"] if facts.export else None
    fields: dict[str, Any] = {
        **stated,
        "library_name": LIBRARIES.get(export_format, export_format) if export_format else "draftsmith",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draftsmith", *TAGS[facts.kind]],
    }
    base = facts.target if facts.by_eagle else facts.read_model
    if base is not None and is_hub_id(base.partition("@")[0]):
        fields["base_model"] = base.partition("@")[0]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def is_hub_id(path: str | None) -> bool:
    """OWNER/NAME that is not a directory here: what `data.models.model_directory` fetches from the hub."""
    return path is not None and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", path)) and not Path(path).exists()


def shape(facts: Facts) -> list[str]:
    """Sizes of the head, and where an imported or exported one is from."""
    lines = []
    head = facts.head
    if "llama" in head:
        llama = head["llama"]
        kind = llama["rope_scaling"]["kind"]
        lines.append(
            f"- {llama['num_layers']} decoder layer(s) of width {llama['hidden_size']}: {llama['num_heads']} heads of "
            f"{llama['head_dim']} ({llama['num_kv_heads']} of keys and values), MLP of {llama['intermediate_size']}, "
            f"vocabulary of {llama['vocab_size']}; rotary base {llama['rope_theta']:g}, scaling {kind}"
        )
    elif "num_blocks" in head:
        lines += described(head)
    if facts.imported is not None:
        source = {key: value for key, value in facts.imported.items() if key not in ("producer", "notes")}
        lines.append(f"- imported from {facts.imported.get('producer', 'an unknown producer')}: {code(source)}")
        lines += [f"- {note}" for note in facts.imported.get("notes", ())]
    if facts.export is not None:
        if origin := facts.export.get("head"):
            lines.append(f"- made from the head {code(origin.get('path'))}, weights' sha256 `{origin['sha256']}`")
        if "weights" in facts.export:
            lines.append(f"- weights in {facts.export['weights']}")
        lines += [f"- {note}" for note in facts.export.get("notes", ())]
    tables = [inputs_table(head)] if "num_blocks" in head else []
    return ["\n".join(lines), *tables]


def target(facts: Facts) -> str:
    models = facts.manifest.get("models") or {}
    if facts.kind == "hf-assisted":
        export = facts.export or {}
        lines = [f"- {flag}: {code(export.get(flag)) or facts.unknown}" for flag in ("target", "draft")]
        lines.append(f"- identity of the draft: {code(models.get('draft')) or facts.unknown}")
        lines.append(f"- tokenizer: {code(models.get('tokenizer')) or facts.unknown}")
        return "\n".join(lines)
    name = "EAGLE head" if facts.by_eagle else facts.reads
    lines = [f"- {name}, whose hidden states it reads: {code(facts.read_model) or facts.unknown}"]
    lines.append(f"- identity of the {name}: {code(facts.manifest.get('target')) or facts.unknown}")
    if facts.kind == "acceptance":
        lines.append(
            f"- identity of the target, whose verdicts it predicts: {code(models.get('target')) or facts.unknown}"
        )
    lines.append(f"- tokenizer: {code(models.get('tokenizer')) or facts.unknown}")
    lines.append(f"- chat template: {code(models.get('chat_template')) or facts.unknown}")
    refused = "Identities are hashes of content; `draftsmith` refuses other models."
    taken = "No identity is recorded: `draftsmith` takes any model of its width and vocabulary."
    return "\n".join([*lines, "", refused if facts.manifest.get("target") else taken])


def data(facts: Facts) -> str:
    inputs, counts = facts.manifest.get("inputs") or {}, facts.manifest.get("samples") or {}
    lines = []
    for name, said in (("data", "trained on"), ("val", "validated on")):
        if name in inputs:
            lines.append(f"- {said}: {code(facts.config.get(name)) or 'unknown path'}, digest `{inputs[name]}`")
    for name, part in counts.items():
        lines.append(f"- {name}: {part['samples']:,} samples, {part['tokens']:,} tokens{answers_text(part)}")
    if "init" in inputs:
        lines.append(f"- started from: {code(facts.config.get('init'))}, weights' sha256 `{inputs['init']}`")
    return "\n".join(lines) or sentence(facts.unknown)


def answers_text(part: Mapping[str, Any]) -> str:
    """What was learned of them, where it is recorded (data/text/answers.py)."""
    if "answers" not in part:
        return ""
    few, middle, many = (f"{part[f'tokens_p{rank}']:,.0f}" for rank in (5, 50, 95))
    return (
        f"; {part['answers']:,} answers of {part['answer_tokens']:,} tokens ({few}, {middle} and {many} an answer at "
        f"the 5th, 50th and 95th percentile; {part['early_share']:.0%} among the first five of an answer)"
    )


def training(facts: Facts) -> str:
    config = dict(facts.config)
    # Of two settings of which one decides, the other is not shown.
    for decides, other in (("max_steps", "epochs"), ("tokens_per_batch", "batch_size")):
        if decides in config:
            config.pop(other if config[decides] else decides, None)
    rows = [(f"`{name}`", code(config[name])) for name in SETTINGS if config.get(name) is not None]
    if not rows:
        return sentence(facts.unknown)
    step = facts.manifest.get("step")
    steps = f"{step:,} steps. Settings of `draftsmith train {facts.kind}` that decide the result:\n\n" if step else ""
    return steps + "\n".join(markdown_lines(("setting", "value"), rows))


def held_out(facts: Facts) -> str:
    metrics = facts.manifest.get("metrics") or {}
    if not metrics:
        return sentence(facts.unknown) if facts.imported is not None else "Not validated yet."
    rows = "\n".join(f"| {name} | {value:.4g} | {meaning(name)} |" for name, value in sorted(metrics.items()))
    return f"After step {facts.manifest.get('step')}:\n\n| metric | value | meaning |\n|---|---|---|\n{rows}"


def tau_by_task(facts: Facts) -> str:
    if facts.measured is None:
        found = "measures it" if facts.kind == "hf-assisted" else "measures it and writes it here"
        return f"Not measured yet. This {found}:\n\n{shell(bench_command(facts))}"
    rows = []
    several = len(temperatures(facts.measured)) > 1
    for row in facts.measured["methods"]:
        label = f"{row['method']}, temperature {row['temperature']:g}" if several else row["method"]
        rows.append(("all", *tau_cells(label, row)))
        rows += [(task, *tau_cells(label, part)) for task, part in (row.get("by_task") or {}).items()]
    headings = ("task", "method", "prompts", "tokens", "tau", "speed-up")
    return "\n".join([*markdown_lines(headings, rows), "", counting_rule(facts.measured)])


def tau_cells(method: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    return method, str(row["prompts"]), f"{row['tokens']:,}", f"{row['tau']:.3f}", f"{row['speedup']:.2f}x"


def temperatures(measured: Mapping[str, Any]) -> list[float]:
    """At which the methods were measured; earlier measurements have one, in their settings."""
    single = measured["settings"]["temperature"]
    return sorted({row.get("temperature", single) for row in measured["methods"]})


def sampling_mode(temperature: float, settings: Mapping[str, Any]) -> str:
    if temperature == 0:
        return "greedy decoding"
    kept = f"top-k {settings['top_k'] or 'all'}, top-p {settings['top_p']:g}"
    return f"sampling at temperature {temperature:g}, {kept}"


def counting_rule(measured: Mapping[str, Any]) -> str:
    """What tau counts, and how the numbers were taken."""
    settings, prompts = measured["settings"], measured["prompts"]
    mode = " and under ".join(sampling_mode(temperature, settings) for temperature in temperatures(measured))
    clock = "CPU time" if measured["clock"] == "cpu" else "wall time"
    machine = measured["hardware"].get("gpu") or measured["hardware"].get("cpu", "unknown")
    rule = (
        f"tau is emitted tokens per target call under {mode}. Emitted tokens are cut at the end token (kept) and at "
        f"{settings['max_new_tokens']} before they are counted; the token that the target adds to a draft (the bonus "
        "token) is one of them; the prefill is one of the target's calls. Over prompts it is a ratio of sums, never a "
        f"mean of ratios. Speed-up is tokens per second of {clock}, over autoregressive decoding by the same engine in "
        "the same run."
    )
    how = (
        f"Prompts: {code(prompts['source'])}, {prompts['count']}, sha256 `{prompts['sha256']}`. Machine: {machine}, "
        f"{settings['dtype']} on {settings['device']}, {settings['num_threads']} thread(s), {settings['batch_size']} "
        f"prompt(s) at a time, {settings['repeats']} repeat(s). Date: {measured['date']}, commit "
        f"{measured.get('git_commit') or 'unknown'}."
    )
    return f"{rule}\n\n{how}"


def bench_command(facts: Facts) -> str:
    words = f"{models_words(facts)} --methods {method(facts)} --prompts FILE --output runs/bench"
    return f"draftsmith eval bench {words}" + ("" if facts.kind == "hf-assisted" else " --card")


def method(facts: Facts) -> str:
    if facts.kind == "acceptance":
        return method_of(facts.head, facts.by_eagle)
    return {"eagle": "eagle:k=5", "hf-assisted": "hf-assisted:k=5"}[facts.kind]


def models_words(facts: Facts) -> str:
    """Words of a command line that name the models; what is not known is left to the reader, in capitals."""
    target = shlex.quote(facts.target or "TARGET")
    if facts.kind == "eagle":
        return f"--target {target} --eagle DIR"
    if facts.kind == "acceptance":
        drafter = shlex.quote(facts.read_model or facts.reads.upper())
        return f"--target {target} --{facts.reads} {drafter} --acceptance DIR"
    return f"--target {target} --draft DIR"


def calibration(facts: Facts) -> str:
    if facts.kind != "acceptance":
        return "None: it proposes tokens, and the target's verdict does not depend on how sure it was of them."
    return calibration_text(facts.manifest, facts.unknown)


def usage(facts: Facts) -> str:
    """Command lines; DIR is this directory."""
    if facts.export is not None:
        checks = "\n".join(f"- {check}" for check in facts.export.get("checks", ())) or "- none"
        language = "python" if facts.kind == "hf-assisted" else "sh"
        command = shell(facts.export["command"], language=language)
        return f"{command}\n\nChecked when it was written, and passed:\n\n{checks}"
    lines = [f"draftsmith decode PROMPT {models_words(facts)} --method {method(facts)}"]
    if facts.kind == "eagle":
        of = f" --target {shlex.quote(facts.target or 'TARGET')}"
        lines += [
            f"draftsmith export --head DIR --format {name} --output DIR-{name}{of}" for name in ("vllm", "sglang")
        ]
    else:
        formats = export_formats(facts.head)
        lines += [f"draftsmith export --head DIR --format {name} --output DIR-{name}" for name in formats]
    return f"DIR is this directory.\n\n{shell(*lines)}"


def licence(facts: Facts) -> str:
    said = f"`{facts.license}`, as stated when it was made." if facts.license else f"{sentence(NOT_STATED)}"
    model = code(facts.read_model) or f"the {facts.reads}"
    others = (
        "of the target, whose verdicts it predicts, and of the data" if facts.kind == "acceptance" else "of the data"
    )
    if facts.kind == "hf-assisted":
        return (
            f"{said} It is that of the draft model, which this program does not know: look it up before you share it."
        )
    return (
        f"{said} What it may be used for depends on the licence of {model}, whose hidden states it was made from, and "
        f"on those {others}. This program knows none of them: look them up before you share the head."
    )


def versions(facts: Facts) -> str:
    packages = facts.manifest.get("packages") or {}
    known = {name: packages.get(name) or "unknown (not installed)" for name in ("draftsmith", "torch", "transformers")}
    lines = [", ".join(f"{name} {version}" for name, version in known.items()) if packages else sentence(facts.unknown)]
    if facts.manifest.get("git_commit"):
        lines[0] += f"; commit {facts.manifest['git_commit']}"
    if facts.export is None:
        lines.append("`manifest.json` holds everything, with hashes.")
    return "\n\n".join(lines)


SECTIONS: dict[str, Callable[[Facts], str]] = {
    "Target and tokenizer": target,
    "Data": data,
    "Training": training,
    "Measured on held-out samples": held_out,
    "tau by task": tau_by_task,
    "Calibration": calibration,
    "How to use it": usage,
    "Licence": licence,
    "Versions": versions,
}
# Whose own card says the rest.
OF_A_DRAFT_MODEL = ("Target and tokenizer", "tau by task", "How to use it", "Licence", "Versions")

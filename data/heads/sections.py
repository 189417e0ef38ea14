"""The model card of a head or of an export: what it is, what it was made from, what was measured, how to use it.

Pure: from a head's manifest (train/fit.py writes it, an import writes a shorter one), its `measured.json`
(data/heads/measured.py) and what an export says of itself. A card never says more than these do: what they lack is
unknown. `ModelCard` has what all cards say; what differs by what the card is of is in data/heads/card.py and
data/heads/acceptance_card.py.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from draftsmith.data.heads.markdown import code, markdown_lines, sentence, shell
from draftsmith.data.heads.metrics import metric_help
from draftsmith.modules.drafters.base import HeadCard

# Library that an export's format belongs to, as the model hub names it, where that is not the format's own name.
LIBRARIES = {"hf-assisted": "transformers"}
# Settings that every training has and that decide its result, in the order in which a reader asks for them.
SETTINGS = (
    *("features", "feature_dtype", "epochs", "max_steps", "batch_size", "tokens_per_batch", "max_length"),
    *("optimizer", "lr", "schedule"),
    *("warmup_share", "min_lr_share", "weight_decay", "betas", "clip", "precision", "model_dtype", "val_share", "seed"),
)
NOT_STATED = "not stated"
IMPORTED = "unknown: the head was imported"


@dataclass(frozen=True)
class ModelCard(ABC):
    """Markdown, after a front matter as the model hub reads it.

    kind: what `train` calls the head; nothing for a draft model.
    manifest: the head's `manifest.json`, with the `head` of its `config.json` where that is at hand. All of it is
        optional: an imported head has `imported` (producer, path, ...) in the place of config, step and metrics.
    measured: the content of `measured.json`.
    export: of an exported directory: `format`; `command`, which serves it; `checks`, lines that say what was checked
        and passed; `head`, `path` and `sha256` of what it was made from; `weights`, their type; `notes`, lines. Of a
        draft model `target` and `draft`, as given, and no head.
    language: of an export's command.
    """

    kind: str
    manifest: Mapping[str, Any]
    measured: Mapping[str, Any] | None = None
    export: Mapping[str, Any] | None = None

    language: ClassVar[str] = "sh"

    # -- what differs

    @property
    @abstractmethod
    def about(self) -> HeadCard:
        """What the thing says of itself."""

    @property
    @abstractmethod
    def models_words(self) -> str:
        """Words of a command line that name the models; what is not known is left to the reader, in capitals."""

    @property
    def reads(self) -> str:
        """The flag that names what gives the hidden states that the head reads."""
        return "target"

    @property
    def reads_name(self) -> str:
        """What that is, in words."""
        return self.reads

    @property
    def base_model(self) -> str | None:
        """Path or hub id of the model that the hub is to list the head with."""
        return self.read_model

    def tables(self) -> list[str]:
        """Tables on what the head is."""
        return []

    def verdicts(self) -> list[str]:
        """Lines on further models that it has to do with."""
        return []

    def exports(self) -> list[str]:
        """Command lines that export the head; DIR is its directory."""
        return []

    def own_settings(self) -> list[str]:
        """Settings of a training that only this kind of head has and that decide its result."""
        return []

    # -- what is known

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

    def recorded(self, flag: str) -> str | None:
        """Path or hub id that a training or an import was given for a model."""
        return self.config.get(flag) or (self.imported or {}).get(flag)

    @property
    def read_model(self) -> str | None:
        """Path or hub id of what gives the hidden states that the head reads."""
        return self.recorded(self.reads)

    @property
    def head(self) -> Mapping[str, Any]:
        return self.manifest.get("head") or {}

    @property
    def models(self) -> Mapping[str, Any]:
        return self.manifest.get("models") or {}

    @property
    def target(self) -> str | None:
        """Path or hub id of the target: of an acceptance head only a benchmark may know it."""
        return self.recorded("target") or (self.measured or {}).get("settings", {}).get("target")

    @property
    def license(self) -> str:
        """Empty where nobody has stated one."""
        return self.manifest.get("license") or self.config.get("license") or ""

    # -- the card

    def text(self) -> str:
        """The whole card."""
        heading = f"{self.about.title}, exported for {self.export['format']}" if self.export else self.about.title
        parts = [self.front_matter(), f"# {heading}\n\n{self.about.what}", *self.shape()]
        parts += [f"## {name}\n\n{section()}" for name, section in self.sections().items()]
        return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"

    def sections(self) -> dict[str, Callable[[], str]]:
        """Heading -> what writes the section."""
        return {
            "Target and tokenizer": self.target_section,
            "Data": self.data_section,
            "Training": self.training_section,
            "Measured on held-out samples": self.held_out_section,
            "tau by task": self.tau_section,
            "Calibration": self.calibration_section,
            "How to use it": self.usage_section,
            "Licence": self.licence_section,
            "Versions": self.versions_section,
        }

    def front_matter(self) -> str:
        """The fields by which the model hub finds a model. It takes `other` with a name for a licence that it does not
        list, and hub ids only as base models."""
        stated = {"license": self.license} if self.license else {"license": "other", "license_name": "not-stated"}
        format = self.export["format"] if self.export else "draftsmith"
        fields: dict[str, Any] = {
            **stated,
            "library_name": LIBRARIES.get(format, format),
            "pipeline_tag": "text-generation",
            "tags": ["speculative-decoding", "draftsmith", *self.about.tags],
        }
        base = (self.base_model or "").partition("@")[0]
        if is_hub_id(base):
            fields["base_model"] = base
        return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"

    def shape(self) -> list[str]:
        """Sizes of the head, and where an imported or exported one is from."""
        lines = list(self.about.shape)
        if self.imported is not None:
            source = {key: value for key, value in self.imported.items() if key not in ("producer", "notes")}
            lines.append(f"- imported from {self.imported.get('producer', 'an unknown producer')}: {code(source)}")
            lines += [f"- {note}" for note in self.imported.get("notes", ())]
        if self.export is not None:
            if origin := self.export.get("head"):
                lines.append(f"- made from the head {code(origin.get('path'))}, weights' sha256 `{origin['sha256']}`")
            if "weights" in self.export:
                lines.append(f"- weights in {self.export['weights']}")
            lines += [f"- {note}" for note in self.export.get("notes", ())]
        return ["\n".join(lines), *self.tables()]

    def known(self, value: Any) -> str:
        """The value as code, or what is said where it is not known."""
        return code(value) or self.unknown

    def target_section(self) -> str:
        name, models = self.reads_name, self.models
        lines = [
            f"- {name}, whose hidden states it reads: {self.known(self.read_model)}",
            f"- identity of the {name}: {self.known(self.manifest.get('target'))}",
            *self.verdicts(),
            f"- tokenizer: {self.known(models.get('tokenizer'))}",
            f"- chat template: {self.known(models.get('chat_template'))}",
        ]
        refused = "Identities are hashes of content; `draftsmith` refuses other models."
        taken = "No identity is recorded: `draftsmith` takes any model of its width and vocabulary."
        return "\n".join([*lines, "", refused if self.manifest.get("target") else taken])

    def data_section(self) -> str:
        inputs, counts = self.manifest.get("inputs") or {}, self.manifest.get("samples") or {}
        lines = []
        for name, said in (("data", "trained on"), ("val", "validated on")):
            if name in inputs:
                lines.append(f"- {said}: {code(self.config.get(name)) or 'unknown path'}, digest `{inputs[name]}`")
        for name, part in counts.items():
            lines.append(f"- {name}: {part['samples']:,} samples, {part['tokens']:,} tokens{answers_text(part)}")
        if "init" in inputs:
            lines.append(f"- started from: {code(self.config.get('init'))}, weights' sha256 `{inputs['init']}`")
        return "\n".join(lines) or sentence(self.unknown)

    def training_section(self) -> str:
        config = dict(self.config)
        # Of two settings of which one decides, the other is not shown.
        for decides, other in (("max_steps", "epochs"), ("tokens_per_batch", "batch_size")):
            if decides in config:
                config.pop(other if config[decides] else decides, None)
        shown = dict.fromkeys(("init", *self.own_settings(), *SETTINGS))
        rows = [(f"`{name}`", code(config[name])) for name in shown if config.get(name) is not None]
        if not rows:
            return sentence(self.unknown)
        step = self.manifest.get("step")
        said = f"Settings of `draftsmith train {self.kind}` that decide the result"
        return (f"{step:,} steps. {said}:\n\n" if step else "") + "\n".join(markdown_lines(("setting", "value"), rows))

    def held_out_section(self) -> str:
        metrics = self.manifest.get("metrics") or {}
        if not metrics:
            return sentence(self.unknown) if self.imported is not None else "Not validated yet."
        help = {name: self.about.metrics.get(name) or metric_help(name) for name in metrics}
        rows = "\n".join(f"| {name} | {value:.4g} | {help[name]} |" for name, value in sorted(metrics.items()))
        return f"After step {self.manifest.get('step')}:\n\n| metric | value | meaning |\n|---|---|---|\n{rows}"

    def tau_section(self) -> str:
        if self.measured is None:
            return f"Not measured yet. This measures it and writes it here:\n\n{shell(self.bench_command + ' --card')}"
        rows = []
        several = len(measured_temperatures(self.measured)) > 1
        for row in self.measured["methods"]:
            label = f"{row['method']}, temperature {row['temperature']:g}" if several else row["method"]
            rows.append(("all", *tau_cells(label, row)))
            rows += [(task, *tau_cells(label, part)) for task, part in (row.get("by_task") or {}).items()]
        headings = ("task", "method", "prompts", "tokens", "tau", "speed-up")
        return "\n".join([*markdown_lines(headings, rows), "", counting_rule(self.measured)])

    @property
    def bench_command(self) -> str:
        words = f"{self.models_words} --methods {self.about.method} --prompts FILE --output runs/bench"
        return f"draftsmith eval bench {words}"

    def calibration_section(self) -> str:
        return "None: it proposes tokens, and the target's verdict does not depend on how sure it was of them."

    def usage_section(self) -> str:
        """Command lines; DIR is this directory."""
        if self.export is not None:
            checks = "\n".join(f"- {check}" for check in self.export.get("checks", ())) or "- none"
            command = shell(self.export["command"], language=self.language)
            return f"{command}\n\nChecked when it was written, and passed:\n\n{checks}"
        decode = f"draftsmith decode PROMPT {self.models_words} --method {self.about.method}"
        return f"DIR is this directory.\n\n{shell(decode, *self.exports())}"

    @property
    def licence_stated(self) -> str:
        return f"`{self.license}`, as stated when it was made." if self.license else f"{sentence(NOT_STATED)}"

    def licence_section(self, others: str = "of the data") -> str:
        """others: what else the head was made from."""
        model = code(self.read_model) or f"the {self.reads}"
        depends = f"the licence of {model}, whose hidden states it was made from, and on those {others}"
        return (
            f"{self.licence_stated} What it may be used for depends on {depends}. This program knows none of them: "
            "look them up before you share the head."
        )

    def versions_section(self) -> str:
        packages = self.manifest.get("packages") or {}
        names = ("draftsmith", "torch", "transformers")
        known = ", ".join(f"{name} {packages.get(name) or 'unknown (not installed)'}" for name in names)
        line = known if packages else sentence(self.unknown)
        if self.manifest.get("git_commit"):
            line += f"; commit {self.manifest['git_commit']}"
        return line if self.export is not None else f"{line}\n\n`manifest.json` holds everything, with hashes."


def is_hub_id(path: str | None) -> bool:
    """OWNER/NAME that is not a directory here: what `data.models.model_directory` fetches from the hub."""
    return path is not None and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", path)) and not Path(path).exists()


def answers_text(part: Mapping[str, Any]) -> str:
    """What was learned of them, where it is recorded (data/text/answers.py)."""
    if "answers" not in part:
        return ""
    few, middle, many = (f"{part[f'tokens_p{rank}']:,.0f}" for rank in (5, 50, 95))
    return (
        f"; {part['answers']:,} answers of {part['answer_tokens']:,} tokens ({few}, {middle} and {many} an answer at "
        f"the 5th, 50th and 95th percentile; {part['early_share']:.0%} among the first five of an answer)"
    )


def tau_cells(method: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    return method, str(row["prompts"]), f"{row['tokens']:,}", f"{row['tau']:.3f}", f"{row['speedup']:.2f}x"


def measured_temperatures(measured: Mapping[str, Any]) -> list[float]:
    """The temperatures that were measured; earlier measurements have one, in their settings."""
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
    mode = " and under ".join(sampling_mode(temperature, settings) for temperature in measured_temperatures(measured))
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

"""`draftsmith import`: a head of another system as one of ours."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from draftsmith.data.exchange.directory import package_directory, read_package, weight_files
from draftsmith.data.exchange.facts import facts_of
from draftsmith.data.exchange.record import read_record
from draftsmith.data.heads.card import model_card
from draftsmith.data.heads.directory import build_head, check_sizes, head_fields, save_head
from draftsmith.data.models.loading import load_lm, tokenizer_identity
from draftsmith.data.progress import say
from draftsmith.data.store.manifest import (
    compare_identity,
    file_sha256,
    git_commit,
    package_versions,
    warn_not_compared,
)
from draftsmith.data.store.writer import occupied, sole_writer
from draftsmith.modules.interop import FORMATS
from draftsmith.modules.interop.base import Package, Parsed, TargetFacts
from draftsmith.modules.interop.detect import detect
from draftsmith.modules.interop.specdec_pp import UNCORRECTED
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    from torch import nn

# Kind of head -> flag of the model whose hidden states it reads.
READS = {"eagle": "target", "acceptance": "draft"}
SYSTEMS = {"eagle": "SafeAILab/EAGLE", "vllm": "vLLM", "sglang": "SGLang", "specdec_pp": "SpecDec_pp"}
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ImportConfig:
    """Write a head of another system as one of ours, which decodes, is measured and is trained on.

    Attributes:
        directory: The head: a local directory or a hub id, with config.json and model.safetensors or pytorch_model.bin.
        output: The head directory to write; new or empty.
        target: The model that an EAGLE head drafts for. It is recorded, and the head is refused on other models.
        draft: The draft model that an acceptance head was trained for; recorded in the same way.
        format: Whose head it is: eagle (SafeAILab), vllm, sglang, specdec_pp, or acceptance, which export writes; auto
            finds out.
        w_rej: Loss weight of rejected tokens that an acceptance head was trained with (SpecDec_pp's
            --weight_mismatch), which no file says; it corrects the calibrated output.
        engine: How the target or draft is read; lean for Llama-family weights, hf for any transformers model.
        trust_remote_code: Run code that comes with the target or draft; never with the head.
    """

    directory: str
    output: Path
    target: str | None = None
    draft: str | None = None
    format: Literal["auto", "eagle", "vllm", "sglang", "specdec_pp", "acceptance"] = "auto"
    w_rej: float = 1.0
    engine: Literal["auto", "lean", "hf"] = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.w_rej < float("inf"):
            raise InputError("w_rej", self.w_rej, "a number above 0", "Pass 1 where rejected tokens weighed no more.")


@dataclass(frozen=True)
class ReadModel:
    """The model whose hidden states the head reads, as far as it was given."""

    path: str | None = None
    facts: TargetFacts | None = None
    info: Any = None  # ModelInfo
    models: dict[str, Any] = dataclasses.field(default_factory=dict)


@sole_writer()
def run(config: ImportConfig) -> Path:
    """Import one head; the path of its new directory.

    Raises:
        InputError: the directory is not what it should be, our head can not be it, or it does not fit the model.
    """
    if occupied(config.output):
        raise InputError("output", f"{config.output}, which exists", "a new directory", "Choose another, or remove it.")
    package = read_package(config.directory)
    shapes = {name: tuple(tensor.shape) for name, tensor in package.tensors.items()}
    producer = detect(package.config, shapes) if config.format == "auto" else config.format
    kind = FORMATS[producer]
    _check_flags(config, kind, producer)
    model = _read_model(config, READS[kind])
    parsed = importlib.import_module(f"draftsmith.modules.interop.{producer}").parse(package, model.facts)
    parsed = _with_run_time_values(config, parsed)
    if model.info is not None:
        check_sizes("head", config.directory, parsed.config, model.info.hidden_size, model.info.vocab_size)
        _check_record(config, READS[kind], model)
    head = build(kind, parsed, package)
    manifest = _manifest(config, kind, producer, parsed, model)
    save_head(config.output, head, manifest, model_card(kind, {**manifest, "head": head_fields(head)}))
    _report(config, kind, producer, parsed, model, unsound(package, producer, model))
    return config.output


def unsound(package: Package, producer: str, model: ReadModel) -> list[str]:
    """What the system itself would not compute of the directory as it lies there."""
    reading = importlib.import_module(f"draftsmith.modules.interop.{producer}").read(package, model.facts)
    return [f"{finding.where}: {finding.text}" for finding in reading.findings if finding.level == "error"]


def _check_flags(config: ImportConfig, kind: str, producer: str) -> None:
    """Raises InputError for flags of the other kind of head, which would be passed over."""
    for other, flag in READS.items():
        if other != kind and getattr(config, flag) is not None:
            expected = f"--{READS[kind]}: this is an {kind} head ({producer})"
            raise InputError(flag, getattr(config, flag), expected, f"Pass --{READS[kind]} in its place.")
    if producer != "specdec_pp" and config.w_rej != 1.0:
        raise InputError("w_rej", config.w_rej, f"a head of specdec_pp: this is one of {producer}", "Leave it out.")


def _check_record(config: ImportConfig, flag: str, model: ReadModel) -> None:
    """A head that this project exported says what it was trained for, which another model's name would cover up.

    Raises:
        InputError: the model is another one.
    """
    record = read_record(package_directory(config.directory))
    recorded = (record or {}).get("head", {}).get("target") or {}
    of_model = {key: value for key, value in recorded.items() if key != "eagle"}
    if not of_model:
        return
    differing, unrecorded = compare_identity({flag: model.info.identity}, {flag: of_model})
    if differing:
        names = ", ".join(key.removeprefix(f"{flag}.") for key, _, _ in differing)
        found = f"{model.path}, which is another model than the head was trained for ({names} differ)"
        remedy = f"Pass that one; or leave --{flag} out, and train the head on with --init."
        raise InputError(flag, found, "the model it was trained for", remedy)
    warn_not_compared(str(config.directory), unrecorded)


def _read_model(config: ImportConfig, flag: str) -> ReadModel:
    path = getattr(config, flag)
    if path is None:
        return ReadModel()
    lm = load_lm(path, "auto", "cpu", config.engine, config.trust_remote_code)
    models = {flag: lm.info.identity, **tokenizer_identity(path)}
    return ReadModel(path, facts_of(path, lm), lm.info, models)


def _with_run_time_values(config: ImportConfig, parsed: Parsed) -> Parsed:
    if config.w_rej == 1.0:
        return parsed
    changed = dataclasses.replace(parsed.config, w_rej=config.w_rej)
    notes = [note for note in parsed.notes if note != UNCORRECTED]
    return dataclasses.replace(parsed, config=changed, notes=(*notes, f"w_rej {config.w_rej:g} is taken, as given"))


def build(kind: str, parsed: Parsed, package: Package) -> nn.Module:
    """The head, with exactly the parsed weights, in the dtype of the file; an acceptance head is float32.

    Raises:
        InputError: tensors that are missing, unknown or of another shape, or values that are no numbers.
    """
    if odd := [name for name, tensor in parsed.state.items() if not bool(tensor.isfinite().all())]:
        raise InputError("weights", f"infinite or undefined values in {odd[0]}", "numbers", "Fetch the head again.")
    stored = {name.removeprefix("model."): tensor.dtype for name, tensor in package.tensors.items()}
    state = {
        # Formats parse into float32, from which the narrower dtypes come back as they were.
        name: tensor.to(stored[name]) if kind == "eagle" and stored.get(name) in NARROW else tensor
        for name, tensor in parsed.state.items()
    }
    return build_head(kind, parsed.config, state)


def _manifest(config: ImportConfig, kind: str, producer: str, parsed: Parsed, model: ReadModel) -> dict[str, Any]:
    """What is known of the head: no settings, data or losses of a training."""
    files = weight_files(package_directory(config.directory))
    source = {
        "producer": producer,
        "path": config.directory,
        "sha256": {file.name: file_sha256(file) for file in files},
        READS[kind]: model.path,
        "notes": list(parsed.notes),
    }
    return {
        "target": None if model.info is None else model.info.identity,
        "models": model.models,
        "sampling": None,
        "imported": source,
        "packages": package_versions(),
        "git_commit": git_commit(),
    }


def _report(
    config: ImportConfig, kind: str, producer: str, parsed: Parsed, model: ReadModel, errors: list[str]
) -> None:
    """What came of it, what a user should know of it, and what to do next. errors: as of `unsound`."""
    out, flag = shlex.quote(str(config.output)), READS[kind]
    path = shlex.quote(model.path) if model.path else flag.upper()
    system = SYSTEMS.get(producer, producer)
    say(f"{kind} head in the format of {system}: {config.output}")
    for note in parsed.notes:
        say(f"  note: {note}")
    if model.path is None:
        say(f"  note: no --{flag} was given: nothing is recorded of it, and other models are not refused")
    for error in errors:
        say(f"  note: {system} would not compute this head from the directory as it is: {error}")
    say("Next:")
    if not errors:
        say(f"  draftsmith check {shlex.quote(config.directory)} --format {producer} --{flag} {path}")
    elif not getattr(parsed.config, "fc_bias", False):  # no format keeps that one
        say(f"  draftsmith export --format {producer} --head {out} --{flag} {path} --output DIR")
    if kind == "eagle":
        say(f"  draftsmith eval bench --target {path} --eagle {out} --methods eagle:k=5 --prompts FILE")
        say(f"  draftsmith train eagle --init {out} --target {path} --data FILE --output DIR")
    else:
        models = f"--target TARGET --draft {path} --acceptance {out}"
        say(f"  draftsmith eval bench {models} --methods specdec++:h=0.7 --prompts FILE")

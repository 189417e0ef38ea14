"""`draftsmith export`: write a head, or a draft model, as another system loads it, and check what was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.console import print_text
from draftsmith.data.store.writer import occupied, sole_writer
from draftsmith.eval.check.check import CheckReport, check_head, original, print_report
from draftsmith.eval.check.record import hashes_of, types_of
from draftsmith.eval.check.states import state_source
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.modules.formats import GGUF, MTP, ORIGINAL, check_served, formats, formats_of
from draftsmith.modules.formats.base import FLOATS, HeadFormat, ImportedHead, Package, Served, TargetFacts
from draftsmith.modules.formats.gguf import head_to_gguf
from draftsmith.modules.formats.llama_format import LlamaFormat
from draftsmith.modules.formats.quantized import FORMATS, quantizable, quantize, served_memory, with_quantized
from draftsmith.modules.pretrained.card import measured_chains, measured_of, model_card
from draftsmith.modules.pretrained.checkpoint import INDEX, Checkpoint
from draftsmith.modules.pretrained.directory import RECORD
from draftsmith.modules.pretrained.files import whole_directory, write_json, write_tensors, write_text
from draftsmith.modules.pretrained.gguf import copied_metadata
from draftsmith.modules.pretrained.gguf_writer import rounded_to_q8, tokenizer_metadata, write_gguf
from draftsmith.modules.pretrained.heads import (
    build_head,
    head_config,
    head_directory,
    head_fields,
    head_settings,
    kind_at,
    made_with,
    named_kind,
    original_of,
    stored_tensors,
)
from draftsmith.modules.pretrained.hub import loadable, resolve_model
from draftsmith.modules.pretrained.provenance import flatten
from draftsmith.modules.pretrained.quantized import Quantized
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.pretrained.stitch import head_package, stitch
from draftsmith.modules.targets.shape import stated_dtype
from draftsmith.modules.types import InputError

HEAD_MANIFEST = {
    "sha256": {"model.safetensors": str},
    **{f"{name}?": (dict, None) for name in ("config", "imported", "metrics")},
}
# Tokens per target call. Chosen, not measured: a head of 1.2 slowed decoding down, one of 1.9 sped it up (README.md).
WORTH_IT = 1.5
GGUF_HEAD = "head.gguf"
TARGET_INDEX = "target-index.json"
NUM_DRAFTED = 3  # tokens a round in printed commands, if nothing was measured
MOST_BY_TAU = 5  # drafted tokens, however long training's own drafts were accepted


class ExportDiffers(Exception):
    """The check of an export found a difference: nothing is kept."""


@sole_writer()
def run(config: ExportConfig) -> int:
    """Export a head. Returns 1, with nothing left in the output, if the check finds a difference.

    Raises:
        InputError: the output exists, the head is not one the format can hold, or a model is missing or another one.
    """
    if occupied(config.output):
        raise InputError("output", f"{config.output}, which exists", "a new directory", "Choose another.")
    write = export_original if config.format == ORIGINAL else export_head
    named = head_directory(config.head) / "config.json"
    if config.format == GGUF and named.exists() and kind_at(config.head) is None:
        remedy = "Convert a draft model with llama.cpp's convert_hf_to_gguf.py."
        raise InputError("head", config.head, "a head's directory", remedy)
    try:
        with whole_directory(config.output) as partial:
            report, command = write(config, partial)
            print_report(report, str(config.output), config.format)
            if report.failures:
                raise ExportDiffers
    except ExportDiffers:
        return 1
    print_text(f"\nWritten to {config.output}. Use it with:\n\n{command}")
    return 0


def export_head(config: ExportConfig, directory: Path) -> tuple[CheckReport, str]:
    """Write and check a head. Returns the report and the command that serves it, with notes."""
    path = head_directory(config.head).resolve()
    # What can be refused is refused before the models are read.
    config_json = head_config(path)
    format, settings = format_for(path, config.format, config_json)
    format.check(settings)
    check_eight_bits(config.weights, format)
    drafts = getattr(settings, "drafts", None)
    if drafts is not None and config.num_drafted > drafts:
        expected = f"at most {drafts}, as the head's blocks have"
        raise InputError("num_drafted", config.num_drafted, expected, "Lower it.")
    manifest = read_object(path / "manifest.json", HEAD_MANIFEST, "Copy or train the head again.")
    recorded = manifest.get("config") or manifest.get("imported") or {}
    source = state_source(False, config.target or recorded.get("target"), None, config.loading)
    check_served(format, source.facts)
    eight = config.weights in FORMATS
    head: Any = original(path, format.kind, source, config_json)

    # Convert and write, by default in the type of the head's file.
    weights: str = config.weights
    if weights == "auto":
        weights = str(next(head.parameters()).dtype).removeprefix("torch.")
    dtype = FLOATS.get(weights, torch.float32)
    if eight:
        dtype = torch.float16 if stated_dtype(source.facts.raw) == "float16" else torch.bfloat16
    full = {name: stored.detach().cpu() for name, stored in stored_tensors(head).items()}
    state = {name: stored.to(dtype) if stored.is_floating_point() else stored for name, stored in full.items()}
    if weights == "q8_0":
        state = {name: rounded_to_q8(stored) for name, stored in state.items()}
    exact = {name: full[name] for name in quantizable(full)} if eight else {}
    if eight and not exact:
        expected = "n x k with n % 64 and k % 128, or n % 128 and k % 64, as servers' kernels need"
        raise InputError("weights", f"{weights} for layers of other sizes", expected, "Pass --weights bfloat16.")
    state |= {name: Quantized().compute(name, quantize(weight, weights)) for name, weight in exact.items()}
    model, written = loadable(source.path), str(config.output)
    package = format.write(head.config, state, dtype, dataclasses.replace(source.facts, path=model))
    if eight:
        package = with_quantized(package, {format.disk_name(name): exact[name] for name in exact}, weights)
    if format.name == GGUF:
        kind = str(package.config["gguf"])
        metadata, tensors = head_to_gguf(package)
        name = f"{format.kind} head of {Path(source.path).stem}"
        named = {"general.name": name, **target_tokenizer(config, source.checkpoint)}
        write_gguf(directory / GGUF_HEAD, kind, {**named, **metadata}, tensors, weights)
        model, written = str(target_file(config, source.path) or "TARGET.gguf"), str(config.output / GGUF_HEAD)
    elif format.name == MTP:
        stitch(source.checkpoint, directory, package.tensors)
    else:
        write_package(directory, package)

    # Read back and compare with the head in the type of the export: rounding to that type is no difference.
    origin = {"path": str(path), "sha256": manifest["sha256"]["model.safetensors"], "target": manifest.get("target")}
    package = head_package(directory, format.name)
    read_back = format.read(package, source.facts)
    record = write_record(directory, format, read_back, origin, manifest.get("tied_to_target", ()))
    exported, package = build_head(format.kind, head.config, state), dataclasses.replace(package, exported=record)
    report = check_head(package, format, source, exported, trained=head if eight else None)

    # Command and card.
    measured = measured_of(path)
    tau = (manifest.get("metrics") or {}).get("tau")
    count = config.num_drafted or num_drafted(measured, format.kind, drafts, tau)
    window = getattr(getattr(settings, "llama", None), "sliding_window", None)
    confidence = bool(getattr(settings, "confidence", False))
    served = Served(model, written, count, source.facts.served_family, window, confidence)
    command, notes = format.serve(served), format.serve_notes(served)
    if format.eight_bits:
        notes.append(f"On the server the head takes {served_memory(full, True)}{'' if eight else ' (--weights)'}.")
    if format.target_index and (note := index_for_target(source.checkpoint, directory)):
        notes.append(note)
    export = {
        "format": format.name,
        "command": command,
        "checks": [str(measure) for measure in report.measures],
        "head": origin,
        "weights": weights,
        "notes": notes,
    }
    facts = {**manifest, "head": head_fields(head), "license": config.license}
    write_text(directory / "README.md", model_card(format.kind, facts, measured=measured, export=export))
    if format.name != GGUF and source.path.endswith(".gguf"):
        notes.append(
            f"{format.system} reads no GGUF: {model} holds the weights of {source.path}, for which it was trained."
        )
    return report, "\n\n".join([command, *notes, *expected_gain(path, measured, format.kind, tau)])


def export_original(config: ExportConfig, directory: Path) -> tuple[CheckReport, str]:
    """Write a head as its files came, and check it by their own format. Returns the report and how it is used.

    Raises:
        InputError: the head was not imported from a directory, or its files cannot hold a trained weight.
    """
    path = head_directory(config.head).resolve()
    config_json = head_config(path)
    kind, files = config_json["kind"], original_of(path)
    if files is None:
        names = " or ".join(other.name for other in formats_of(kind)) or "none: no format holds it"
        raise InputError("format", f"none, and {path} has no files to be written as they came", names, "Pass --format.")
    if config.weights != "auto":
        raise InputError("weights", config.weights, "auto: the files keep their types", "Leave it out, or --format.")
    format = formats()[files.format, kind]
    assert isinstance(format, LlamaFormat)
    manifest = read_object(path / "manifest.json", HEAD_MANIFEST, "Copy or train the head again.")
    recorded = manifest.get("config") or manifest.get("imported") or {}
    source = state_source(False, config.target or recorded.get("target"), None, config.loading)
    head: Any = original(path, kind, source, config_json)
    full = {name: stored.detach().cpu() for name, stored in stored_tensors(head).items()}
    facts = dataclasses.replace(source.facts, path=loadable(source.path))
    package = files.write(format, full, facts, source.drafter.identity)
    write_package(directory, package)

    # Read back by its own format, and compared in the types of the files. What that misread before is as it was.
    read_back = format.read(package, source.facts)
    check_same_config(head.config, read_back.config)
    origin = {"path": str(path), "sha256": manifest["sha256"]["model.safetensors"], "target": manifest.get("target")}
    write_record(directory, format, read_back, origin, manifest.get("tied_to_target", ()))
    state = {name: stored.to(read_back.state[name].dtype) for name, stored in full.items()}
    exported = build_head(kind, head.config, state)
    report = check_head(head_package(directory, format.name), format, source, exported)
    report.problems = [one for one in report.problems if f"{one.where}: {one.text}" not in files.problems]

    # A trainer serves nothing: a server that reads its files alike.
    server = format if format.writes else next(serving(format, package, source.facts), None)
    command, notes = f"draftsmith train {kind} --init {config.output}, or {format.system}", list[str]()
    measured, tau = measured_of(path), (manifest.get("metrics") or {}).get("tau")
    if server is not None:
        count = config.num_drafted or num_drafted(measured, kind, getattr(head.config, "drafts", None), tau)
        window, confidence = head.config.llama.sliding_window, bool(getattr(head.config, "confidence", False))
        served = Served(facts.path, str(config.output), count, facts.served_family, window, confidence)
        command, notes = server.serve(served), server.serve_notes(served)
    notes += [f"As it came: {problem}" for problem in files.problems]
    if "auto_map" in files.config:
        notes.append("config.json names code that is not written: copy it from where the head came.")
    checks = [str(measure) for measure in report.measures]
    export = {"format": format.name, "command": command, "checks": checks, "head": origin, "notes": notes}
    card = {**manifest, "head": head_fields(head), "license": config.license}
    text = model_card(kind, card, measured=measured, export={**export, "weights": "as they came"})
    write_text(directory / "README.md", text)
    return report, "\n\n".join([command, *notes, *expected_gain(path, measured, kind, tau)])


def write_record(
    directory: Path, format: HeadFormat, read: ImportedHead, origin: Mapping[str, Any], tied: Sequence[str]
) -> dict[str, Any]:
    """Write `draftsmith.json`, which says what a directory holds, and return it.

    read: as its format reads it. origin: the head. tied: its tensors that are the target's.
    """
    record = {"format": format.name, "kind": format.kind, "head": origin, "config": dataclasses.asdict(read.config)}
    record["tied_to_target"] = list(tied)
    record |= {"tensors": hashes_of(read.state), "types": types_of(read.state.values())}
    record |= made_with()
    write_json(directory / RECORD, record)
    return record


def check_same_config(head: Any, files: Any) -> None:
    """Raise InputError if files that were written as they came describe another head, as one with another window."""
    ours, theirs = (flatten(dataclasses.asdict(config)) for config in (head, files))
    for name, value in ours.items():
        # Reading raises it to the target's.
        if theirs.get(name) != value and name != "llama.max_position":
            expected = f"{theirs.get(name)}, as the head's own files had"
            raise InputError(name, value, expected, "Write it in a server's format: pass --format.")


def serving(format: HeadFormat, package: Package, target: TargetFacts) -> Iterator[HeadFormat]:
    """Yield the systems that serve a directory of another format as it is."""
    for other in formats_of(format.kind):
        try:
            if other.name != GGUF and not other.read(package, target).problems:
                yield other
        except InputError:
            continue


def check_eight_bits(weights: str, format: HeadFormat) -> None:
    """Raise InputError for weights of 8 bits where the system would not read them."""
    if weights in FORMATS and not format.eight_bits:
        others = [other.name for other in formats_of(format.kind) if other.eight_bits]
        remedy = f"Choose --format {' or '.join(others)}." if others else "Leave it out."
        raise InputError("weights", weights, f"another type: {format.system} {format.sixteen_bits}", remedy)


def target_file(config: ExportConfig, target: str) -> Path | None:
    """Return the target's GGUF file, if there is one."""
    file = Path(resolve_model(target))
    return config.target_gguf or (file if file.suffix == ".gguf" else None)


def target_tokenizer(config: ExportConfig, target: Checkpoint) -> dict[str, Any]:
    """Return the metadata of the target's tokenizer: its GGUF file's, or made of its transformers files."""
    file = target_file(config, target.path)
    if file is None:
        return tokenizer_metadata(target)
    copied: dict[str, Any] = copied_metadata(file)
    fields = {name: value for name, value in copied.items() if name.startswith("tokenizer.")}
    count, size = len(fields["tokenizer.ggml.tokens"][0]), target.shape.vocab_size
    if count != size:
        raise InputError(
            "target_gguf", f"{file} with {count} tokens", f"{size}, as {target.path} has", "Pass its own file."
        )
    return fields


def format_for(head: Path, name: str, config: dict[str, Any]) -> tuple[HeadFormat, Any]:
    """Return the format of this name that holds heads of this kind, and the head's settings.

    config: of `head_config`.

    Raises:
        InputError: a kind that no format of this name holds.
    """
    kind = config["kind"]
    if (name, kind) not in formats():
        holds = [other.name for other in formats_of(kind)]
        remedy = f"Choose {' or '.join(holds)}." if holds else f"No format holds {named_kind(kind)} head."
        expected = " or ".join(f"{named_kind(other)} head" for known, other in formats() if known == name)
        raise InputError("head", f"{head}, {named_kind(kind)} head", f"{expected}, which {name} holds", remedy)
    return formats()[name, kind], head_settings(head, config)


def write_package(directory: Path, package: Package) -> None:
    """Write `config.json` and the weights."""
    write_json(directory / "config.json", dict(package.config), indent=2)
    tensors = {name: tensor.contiguous() for name, tensor in package.tensors.items()}
    # transformers and the servers want to know that the tensors are torch's.
    write_tensors(directory / "model.safetensors", tensors, {"format": "pt"})


def index_for_target(target: Checkpoint, directory: Path) -> str:
    """Write the index of shards through which SafeAILab's code finds a target's embedding, if the target has none.

    It goes into the export, never beside the target. Returns a note that says so, or an empty string.
    """
    source = target.directory
    if (source / INDEX).exists() or not (source / "model.safetensors").exists():
        return ""
    size = {"total_size": (source / "model.safetensors").stat().st_size}
    write_json(
        directory / TARGET_INDEX, {"metadata": size, "weight_map": dict.fromkeys(target.tensors, "model.safetensors")}
    )
    return f"{source} has no {INDEX}, which this code needs beside the target: copy {TARGET_INDEX} there by that name."


def num_drafted(
    measured: Mapping[str, Any] | None, kind: str, drafts: int | None = None, tau: float | None = None
) -> int:
    """Return the drafted tokens a round of the fastest measured chain, else a whole block's, else by tau.

    tau: tokens per target call in training, one of them the target's own. Without it, NUM_DRAFTED.
    """
    if chains := measured_chains(measured, kind):
        return max(chains, key=lambda count: chains[count]["speedup"])
    return drafts or (NUM_DRAFTED if tau is None else min(MOST_BY_TAU, max(1, round(tau))))


def expected_gain(head: Path, measured: Mapping[str, Any] | None, kind: str, tau: float | None) -> list[str]:
    """Return a line on what a head is worth by its own measurements, or that there are none."""
    best = max(measured_chains(measured, kind).values(), key=lambda row: row["speedup"], default=None)
    if best is not None:
        text, pays = f"{best['method']} decoded {best['speedup']:.2f} times as fast as without it", best["speedup"] > 1
    elif tau is not None:
        text, pays = (
            f"it emitted {tau:.2f} tokens per target call in training, one of them the target's",
            tau >= WORTH_IT,
        )
    else:
        unknown = "Neither speed nor tau was measured: draftsmith eval bench --card says whether answers get faster."
        return [unknown] if measured is None else []
    why = "" if pays else f" Expect no gain from this head. See why: draftsmith diagnose {head} --data DATA"
    return [f"Measured in Draftsmith's decoder, not in this server: {text}.{why}"]

"""`draftsmith export`: a head, or a draft model, as another system loads it; checked before it is there."""

from __future__ import annotations

import dataclasses
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from torch import Tensor, nn

from draftsmith.data.exchange.assistant import write_assistant
from draftsmith.data.exchange.check import (
    Format,
    Report,
    check_head,
    drafter_for,
    original,
    print_report,
    report_of_assistant,
)
from draftsmith.data.exchange.directory import SAFEAI
from draftsmith.data.exchange.record import RECORD, make_record
from draftsmith.data.heads.card import model_card
from draftsmith.data.heads.directory import build_head, head_config, head_fields
from draftsmith.data.heads.measured import measured_of
from draftsmith.data.models.hub import loadable
from draftsmith.data.models.loading import DTYPES, load_lm, model_directory, read_config, tokenizer_identity
from draftsmith.data.store.files import whole_directory, write_json, write_tensors, write_text, write_torch
from draftsmith.data.store.manifest import git_commit, package_versions
from draftsmith.data.store.reading import read_object
from draftsmith.data.store.writer import occupied, sole_writer
from draftsmith.modules.interop import FORMATS, hf_assisted
from draftsmith.modules.interop.base import Package
from draftsmith.modules.types import InputError

HEAD_MANIFEST = {"sha256": {"model.safetensors": str}, "config?": (dict, None), "imported?": (dict, None)}
RESULTS = {
    "meta": {"methods": {"*": dict}, "models?": dict, "prompts?": (dict, None)},
    "methods": [{"method": str, "tokens_per_s": float}],
}
INDEX, TARGET_INDEX = "model.safetensors.index.json", "target-index.json"
SAFEAILAB_NOTES = (
    "Its tree of total_token 60, depth 5 and top_k 10 counts the root: here it is eagle2:nodes=59:depth=5:topk=10.",
)
CHAIN = re.compile(r"eagle:k=(\d+)")
# Drafted tokens a round in the printed command where nothing was measured: of a chain, and at most with a stop rule.
NUM_DRAFTED = {"eagle": 5, "acceptance": 20}


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a head as another system loads it, check it by that system's rules, and print the command that serves it.

    Attributes:
        format: eagle (SafeAILab/EAGLE), vllm and sglang take EAGLE heads; specdec_pp an acceptance head with tied
            blocks; acceptance any acceptance head, with a statement of what a server must feed it; hf-assisted a draft
            model, for transformers' assisted generation.
        output: The directory to write; new or empty.
        head: The head's directory, such as runs/eagle-head/best.
        target: The target model. Default: the one named in the head's manifest.
        draft: The draft model to be exported as hf-assisted, or whose hidden states an acceptance head reads (default:
            the one named in its manifest).
        eagle: The EAGLE head whose hidden states an acceptance head reads, where it is not a draft model (default: the
            one named in its manifest).
        results: Directory of an `eval bench` with this draft, for hf-assisted: the fastest settings are taken from it.
        num_drafted: Drafted tokens a round in the printed command; 0 takes the fastest chain of `eval bench --card`,
            else 5 (20 with a stop rule).
        weights: Type of the exported weights; auto keeps the head's.
        license: Licence of the head, for the card.
        dtype: Type of the model that gives hidden states for the check; auto takes what its checkpoint holds.
        device: Where that model runs.
        engine: How it runs; lean for Llama-family weights, hf for any transformers model.
        trust_remote_code: Let the model's repository run its own code.
    """

    format: Format
    output: Path
    head: Path | None = None
    target: str | None = None
    draft: str | None = None
    eagle: Path | None = None
    results: Path | None = None
    num_drafted: int = 0
    weights: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    license: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    engine: Literal["auto", "lean", "hf"] = "auto"
    trust_remote_code: bool = False


class Refused(Exception):
    """The check found a difference: nothing is written."""


@sole_writer()
def run(config: ExportConfig) -> int:
    """0, or 1 when the check finds a difference: nothing is left in the output then.

    Raises:
        InputError: the output exists, the head is not one the format can hold, or a model is missing or another one.
    """
    if occupied(config.output):
        raise InputError("output", f"{config.output}, which exists", "a new directory", "Choose another.")
    write = export_assistant if config.format == "hf-assisted" else export_head
    try:
        with whole_directory(config.output) as partial:
            report, command = write(config, partial)
            print_report(report, str(config.output), config.format)
            if report.failures:
                raise Refused
    except Refused:
        return 1
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\nWritten to {config.output}. Use it with:\n\n{command}", markup=False)
    return 0


def export_head(config: ExportConfig, directory: Path) -> tuple[Report, str]:
    """Write and check an EAGLE or acceptance head; the report, and the command that serves it."""
    if config.head is None:
        raise InputError("head", "none", "the head's directory", "Pass --head.")
    kind = FORMATS[config.format]
    if head_config(config.head)["kind"] != kind:
        found = f"{config.head}, an {head_config(config.head)['kind']} head"
        raise InputError("head", found, f"an {kind} head, which {config.format} holds", "Choose another format.")
    manifest = read_object(config.head / "manifest.json", HEAD_MANIFEST, "Copy or train the head again.")
    recorded = manifest.get("config") or manifest.get("imported") or {}
    if kind == "acceptance" and config.weights not in ("auto", "float32"):
        raise InputError("weights", config.weights, f"float32: {config.format} reads nothing else", "Leave it out.")
    paths = {flag: getattr(config, flag) or recorded.get(flag) for flag in ("target", "draft", "eagle")}
    drafter = drafter_for(config.format, paths, config)
    head: Any = original(config.head, kind, drafter)
    state = exported_state(head, config.weights)
    module = importlib.import_module(f"draftsmith.modules.interop.{config.format}")
    package: Package = module.write(head.config, state, next(iter(state.values())).dtype)
    if kind == "eagle":
        package = dataclasses.replace(package, config={**package.config, **served_dtype(drafter.path)})
    elif config.format == "acceptance":
        known = {name: manifest.get(name) for name in ("drafter", "sampling")}
        package = dataclasses.replace(package, config={**package.config, **known})
    write_package(directory, package)
    if config.format == "specdec_pp":
        # What huggingface_hub before 0.18 reads, which their environment pins; later ones read the safetensors.
        write_torch(directory / SAFEAI, {**package.tensors, **aliases_of(package)})
    origin = {
        "path": str(config.head),
        "sha256": manifest["sha256"]["model.safetensors"],
        "target": manifest.get("target"),
    }
    # By the names that the check reads: ours for EAGLE heads, the format's own for acceptance heads.
    tensors = state if kind == "eagle" else package.tensors
    write_json(directory / RECORD, make_record(config.format, head.config, tensors, origin, made_with()))
    report = check_head(directory, config.format, drafter, build_head(kind, head.config, state))
    more = {"verifier": loadable(config.target)} if config.format == "specdec_pp" and config.target else {}
    if config.format == "acceptance" and drafter.eagle is not None:
        more["eagle"] = str(paths["eagle"])
    command = module.serve(loadable(drafter.path), str(config.output), num_drafted(config, kind), **more)
    export = {
        "format": config.format,
        "command": command,
        "checks": passed(report),
        "head": origin,
        "weights": str(next(iter(state.values())).dtype).removeprefix("torch."),
    }
    notes = [*SAFEAILAB_NOTES, index_for_target(drafter.path, directory)] if config.format == "eagle" else []
    export["notes"] = notes = [note for note in notes if note]
    facts = {**manifest, "head": head_fields(head), "license": config.license}
    card = model_card(kind, facts, measured=measured_of(config.head), export=export)
    write_text(directory / "README.md", card)
    return report, "\n\n".join([command, *notes])


def served_dtype(target: str) -> dict[str, str]:
    """The fields of a config that say in what type to run: the target's, whatever type the weights are stored in.
    SGLang would otherwise run a head in another type than its target."""
    raw = read_config(target)
    named = raw.get("dtype") or raw.get("torch_dtype")
    return {"torch_dtype": named, "dtype": named} if named else {}


def exported_state(head: nn.Module, weights: str) -> dict[str, Tensor]:
    """The head's parameters in the type that is to be written; tied ones once."""
    return {
        name: tensor.detach().cpu() if weights == "auto" else tensor.detach().cpu().to(DTYPES[weights])
        for name, tensor in head.named_parameters()
    }


def write_package(directory: Path, package: Package) -> None:
    write_json(directory / "config.json", dict(package.config), indent=2)
    tensors = {name: tensor.contiguous() for name, tensor in package.tensors.items()}
    # transformers and the servers want to know that the tensors are torch's.
    write_tensors(directory / "model.safetensors", tensors, {"format": "pt", **package.metadata})
    # safetensors keeps others from reading it; a server often runs as somebody else.
    (directory / "model.safetensors").chmod((directory / "config.json").stat().st_mode)


def aliases_of(package: Package) -> dict[str, Tensor]:
    """The further names of tensors that are stored once."""
    return {name: package.tensors[own] for name, own in package.metadata.items() if own in package.tensors}


def index_for_target(target: str, directory: Path) -> str:
    """SafeAILab's code finds a target's embedding through an index of shards, also where there is one file. Where the
    target has none it is written into the export, never beside the target; returns what to do with it.
    """
    from safetensors import safe_open

    source = model_directory(target)
    if (source / INDEX).exists() or not (source / "model.safetensors").exists():
        return ""
    with safe_open(source / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    size = {"total_size": (source / "model.safetensors").stat().st_size}
    write_json(directory / TARGET_INDEX, {"metadata": size, "weight_map": dict.fromkeys(names, "model.safetensors")})
    return f"{source} has no {INDEX}, which this code needs beside the target: copy {TARGET_INDEX} there by that name."


def num_drafted(config: ExportConfig, kind: str) -> int:
    """Drafted tokens a round: as asked for, or of the fastest `eagle:k=K` that was measured of this head."""
    assert config.head is not None
    measured = measured_of(config.head) or {"methods": []}
    speeds = {int(k[1]): row["speedup"] for row in measured["methods"] if (k := CHAIN.fullmatch(row["method"]))}
    return config.num_drafted or max(speeds, key=speeds.__getitem__, default=NUM_DRAFTED[kind])


def export_assistant(config: ExportConfig, directory: Path) -> tuple[Report, str]:
    """Write and check a draft model with measured settings; the report, and the lines of Python that use it."""
    wanted = {"draft": "the draft model", "target": "its target", "results": "a directory of eval bench"}
    for flag, what in wanted.items():
        if getattr(config, flag) is None:
            raise InputError(flag, "none", what, f"Pass --{flag}.")
    draft, target, results = str(config.draft), str(config.target), Path(str(config.results))
    if not (results / "results.json").exists():
        raise InputError("results", f"{results} without results.json", "a directory of eval bench", "Check the path.")
    identity = load_lm(draft, "auto", engine=config.engine, trust_remote_code=config.trust_remote_code).info.identity
    tuning = hf_assisted.choose_tuning(read_object(results / "results.json", RESULTS), identity)
    command = hf_assisted.serve(loadable(target), str(config.output))
    write_assistant(draft, tuning, directory)
    report = report_of_assistant(directory, target)
    export = {"format": config.format, "command": command, "target": target, "draft": draft, "checks": passed(report)}
    export["notes"] = [f"settings: {tuning.measured}"]
    facts = {"models": {"draft": identity, **tokenizer_identity(draft)}, "license": config.license, **made_with()}
    write_text(directory / "README.md", model_card("hf-assisted", facts, export=export))
    return report, command


def passed(report: Report) -> list[str]:
    """What the card says of the check."""
    return [f"{measure.name}: {measure.value} ({measure.bar})" for measure in report.measures]


def made_with() -> dict[str, Any]:
    return {"packages": package_versions(), "git_commit": git_commit()}

"""`draftsmith import`: read a head of another system as one of ours."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import print_text
from draftsmith.data.store.writer import occupied, sole_writer
from draftsmith.eval.check.record import against_model
from draftsmith.eval.check.states import state_source
from draftsmith.launch.export.export import num_drafted
from draftsmith.launch.export.settings import ImportConfig
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.drafters.mtp import MtpHead
from draftsmith.modules.formats import MTP, formats
from draftsmith.modules.formats.base import HeadFormat, ImportedHead
from draftsmith.modules.formats.foreign import detect, head_kind, named_format
from draftsmith.modules.formats.original import Original
from draftsmith.modules.formats.specdec_pp import UNCORRECTED
from draftsmith.modules.pretrained.card import model_card
from draftsmith.modules.pretrained.directory import package_directory, read_package, weight_files
from draftsmith.modules.pretrained.heads import build_head, check_sizes, head_fields, made_with, named_kind, save_head
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.pretrained.stitch import head_package
from draftsmith.modules.types import InputError


@sole_writer()
def run(config: ImportConfig) -> Path:
    """Import one head. Returns the path of its new directory.

    Raises:
        InputError: the directory is not what it should be, our head cannot be it, or it does not fit the model.
    """
    if occupied(config.output):
        raise InputError("output", f"{config.output}, which exists", "a new directory", "Choose another, or remove it.")
    if config.format == MTP:
        package, kind = head_package(Path(config.directory), MTP), MtpHead.kind
        if not package.tensors:
            remedy = "Train one: `draftsmith train mtp` begins with random weights."
            found = f"{config.directory}, without MTP tensors"
            raise InputError("directory", found, "a target that ships some", remedy)
    else:
        package = read_package(config.directory)
        kind = head_kind(package) if config.format == "auto" else named_format(config.format, package).kind
    # Flags of the other kind of head would be ignored.
    predicts = kind == AcceptanceHead.kind
    reads, other = ("draft", "target") if predicts else ("target", "draft")
    if getattr(config, other) is not None:
        expected = f"--{reads}: this is {named_kind(kind)} head"
        raise InputError(other, getattr(config, other), expected, f"Pass --{reads} in its place.")
    if not predicts and config.w_rej != 1.0:
        raise InputError("w_rej", config.w_rej, f"an acceptance head: this is {named_kind(kind)} head", "Leave it out.")

    # The model whose hidden states it reads, if it was named.
    source, facts, identity, models = None, None, None, {}
    if getattr(config, reads) is not None:
        loading: dict[str, Any] = {"dtype": "auto", "engine": config.engine, "device": "cpu"}
        loading |= {"trust_remote_code": config.trust_remote_code, "server": config.target_server}
        source = state_source(predicts, config.target, config.draft, loading)
        facts, identity = source.facts, source.drafter.identity
        models = {reads: identity, **source.checkpoint.tokenizer_identity}
    format = detect(package, facts) if config.format == "auto" else formats()[config.format, kind]
    imported = format.read(package, facts)
    if config.w_rej != 1.0:
        notes = tuple(note for note in imported.notes if note != UNCORRECTED)
        weighted = dataclasses.replace(imported.config, w_rej=config.w_rej)
        imported = dataclasses.replace(imported, config=weighted, notes=notes)
    if source is not None:
        info = source.drafter.lm.info
        check_sizes("head", config.directory, imported.config, info.hidden_size, info.vocab_size)
        # An export of ours names the target that it was trained for, which another model's identity would hide.
        if differing := against_model(package.exported, source.drafter.identity):
            found = f"{source.path}, another model than the head was trained for ({', '.join(differing)} differ)"
            remedy = f"Pass that one; or leave --{reads} out, and train the head on with --init."
            raise InputError(reads, found, "the model it was trained for", remedy)

    head = build_head(format.kind, imported.config, imported.state)
    if odd := [name for name, tensor in imported.state.items() if not bool(tensor.isfinite().all())]:
        raise InputError("weights", f"infinite or undefined values in {odd[0]}", "numbers", "Fetch the head again.")
    # Settings, data and losses of its training are unknown.
    manifest: dict[str, Any] = {
        "target": identity,
        "models": models,
        "sampling": None,
        "tied_to_target": tied_to_target(imported, None if facts is None else facts.lm_head),
        "imported": {
            "producer": format.name,
            "path": config.directory,
            # An MTP module is a part of its target's files, whose hashes are in its identity.
            "sha256": {} if format.name == MTP else hashes(package_directory(config.directory)),
            reads: getattr(config, reads),
            "notes": list(imported.notes),
            "problems": [f"{problem.where}: {problem.text}" for problem in imported.problems],
        },
        **made_with(),
    }
    original = Original.of(format, package, imported, facts, identity)
    save_head(config.output, head, manifest, model_card(format.kind, {**manifest, "head": head_fields(head)}), original)
    _print_result(config, format, imported)
    return config.output


def hashes(directory: Path) -> dict[str, str]:
    """Return the sha256 of a head's weight files."""
    return {file.name: file_sha256(file) for file in weight_files(directory)}


def tied_to_target(imported: ImportedHead, lm_head: Tensor | None) -> list[str]:
    """Return `DraftHead.tied_to_target` of a foreign head: its lm_head, if every row is the target's [V, H]."""
    name, state = "lm_head.weight", imported.state
    if name not in state or lm_head is None:
        return []
    rows = lm_head[state["d2t"]] if "d2t" in state else lm_head
    return [name] if torch.equal(rows.to(state[name].dtype), state[name]) else []


def _print_result(config: ImportConfig, format: HeadFormat, imported: ImportedHead) -> None:
    """Print the result, the notes, and the next commands."""
    out, flag, given = shlex.quote(str(config.output)), format.reads, getattr(config, format.reads)
    path = shlex.quote(given) if given else flag.upper()
    notes = list(imported.notes)
    if given is None:
        notes.append(f"no --{flag} was given: nothing is recorded of it, and other models are not refused")
    for problem in imported.problems:
        where = f"{problem.where}: {problem.text}"
        notes.append(f"{format.system} would not compute this head from the directory as it is: {where}")
    print_text(f"{format.kind} head in the format of {format.system}: {config.output}")
    for note in notes:
        print_text(f"  note: {note}")
    print_text("Next:")
    if not imported.problems:
        print_text(f"  draftsmith check {shlex.quote(config.directory)} --format {format.name} --{flag} {path}")
    elif format.holds(imported.config):
        print_text(f"  draftsmith export --format {format.name} --head {out} --{flag} {path} --output DIR")
    if format.predicts:
        models, method = f"--target TARGET --draft {path} --acceptance {out}", "specdec++:h=0.7"
    else:
        count = num_drafted(None, format.kind, getattr(imported.config, "drafts", None))
        models, method = f"--target {path} --draft {out}", f"{format.kind}:k={count}"
    print_text(f"  draftsmith eval bench {models} --methods {method} --prompts FILE")

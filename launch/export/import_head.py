"""`draftsmith import`: read a head of another system as one of ours, or bind a head to a changed target."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import print_text
from draftsmith.data.store.writer import occupied, sole_writer
from draftsmith.eval.check.record import against_model
from draftsmith.eval.check.states import StateSource, state_source
from draftsmith.launch.export.export import num_drafted
from draftsmith.launch.export.settings import ImportConfig
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.drafters.mtp import MtpHead
from draftsmith.modules.formats import MTP, formats
from draftsmith.modules.formats.base import HeadFormat, ImportedHead, Package
from draftsmith.modules.formats.foreign import detect, head_kind, named_format
from draftsmith.modules.formats.original import Original
from draftsmith.modules.formats.specdec_pp import UNCORRECTED
from draftsmith.modules.pretrained.card import model_card
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.directory import package_directory, read_package, weight_files
from draftsmith.modules.pretrained.heads import (
    build_head,
    check_sizes,
    head_config,
    head_directory,
    head_fields,
    head_settings,
    kind_at,
    made_with,
    named_kind,
    original_of,
    save_head,
    weights_file,
)
from draftsmith.modules.pretrained.provenance import compare_identity, file_sha256
from draftsmith.modules.pretrained.reading import read_object, read_tensors
from draftsmith.modules.pretrained.stitch import head_package
from draftsmith.modules.targets.base import check_aux_layers
from draftsmith.modules.types import InputError

MANIFEST = {"target?": (dict, None), "models?": dict, "config?": (dict, None), "imported?": (dict, None)}
MANIFEST |= {"tied_to_target?": [str]}


@sole_writer()
def run(config: ImportConfig, its_target: bool = False) -> Path:
    """Import one head. Returns the path of its new directory.

    its_target: refuse a target that the head is known not to have been trained for, in place of binding it to that one.

    Raises:
        InputError: the directory is not what it should be, our head cannot be it, or it does not fit the model.
    """
    if occupied(config.output):
        raise InputError("output", f"{config.output}, which exists", "a new directory", "Choose another, or remove it.")
    if config.target is not None and kind_at(config.directory) is not None:
        return bind(config, config.target)
    package, kind = package_of(config)
    predicts = kind == AcceptanceHead.kind
    reads = "head" if predicts else "target"

    # The model whose hidden states it reads, if it was named.
    source, facts, identity, models, bound = None, None, None, {}, None
    if getattr(config, reads) is not None:
        loading: dict[str, Any] = {"dtype": "auto", "loader": config.loader, "device": "cpu"}
        loading |= {"trust_remote_code": config.trust_remote_code, "server": config.server}
        source = state_source(predicts, config.target, config.head, loading)
        facts, identity = source.facts, source.drafter.identity
        models = {"draft" if predicts else "target": identity, **source.checkpoint.tokenizer_identity}
    format = detect(package, facts) if config.format == "auto" else formats()[config.format, kind]
    imported = format.read(package, facts)
    if config.w_rej != 1.0:
        notes = tuple(note for note in imported.notes if note != UNCORRECTED)
        weighted = dataclasses.replace(imported.config, w_rej=config.w_rej)
        imported = dataclasses.replace(imported, config=weighted, notes=notes)
    if source is not None:
        info = source.drafter.lm.info
        check_sizes("head", config.directory, imported.config, info.hidden_size, info.vocab_size)
        bound = trained_for_another(package, source, only=its_target or predicts)
        if bound:
            check_tokenizer(bound["identity"].get("tokenizer"), None, source.checkpoint)
            check_aux_layers(sorted(getattr(imported.config, "aux_layers", ())), info.num_layers)
            take_tied((package.exported or {}).get("tied_to_target", ()), imported.state, source)

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
        **({"bound": bound} if bound else {}),
        **made_with(),
    }
    original = Original.of(format, package, imported, facts, identity)
    save_head(config.output, head, manifest, model_card(format.kind, {**manifest, "head": head_fields(head)}), original)
    _print_result(config, format, imported)
    if bound:
        print_bound(config, format.kind)
    else:
        _print_next(config, format, imported)
    return config.output


def package_of(config: ImportConfig) -> tuple[Package, str]:
    """Read the files of another system's head, and return them with its kind.

    Raises:
        InputError: no head, or an option that belongs to another kind of head.
    """
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
    reads, other = ("head", "target") if predicts else ("target", "head")
    if getattr(config, other) is not None:
        expected = f"--{reads}: this is {named_kind(kind)} head"
        raise InputError(other, getattr(config, other), expected, f"Pass --{reads} in its place.")
    if not predicts and config.w_rej != 1.0:
        raise InputError("w_rej", config.w_rej, f"an acceptance head: this is {named_kind(kind)} head", "Leave it out.")
    return package, kind


def trained_for_another(package: Package, source: StateSource, only: bool) -> dict[str, Any] | None:
    """Return what the manifest records of a head that an export of ours says to be another target's, else None.

    only: refuse it.
    """
    differing = against_model(package.exported, source.drafter.identity)
    if not differing or package.exported is None:
        return None
    if only:
        found = f"{source.path}, another model than the head was trained for ({', '.join(differing)} differ)"
        raise InputError("target", found, "the model it was trained for", "Pass that one.")
    return {"from": None, "identity": package.exported["head"]["target"]}


def bind(config: ImportConfig, target: str) -> Path:
    """Write a head of ours as one of another target of the same shape, such as a fine-tune. No weight is trained.

    A head of this target is copied.

    Raises:
        InputError: no drafting head, or a target of other sizes or with another tokenizer.
    """
    directory = head_directory(config.directory).resolve()
    config_json = head_config(directory)
    kind = config_json["kind"]
    if kind == AcceptanceHead.kind:
        remedy = "Train it on labels of the new pair: draftsmith train acceptance --init."
        raise InputError("directory", f"{config.directory}, an acceptance head", "a head that drafts", remedy)
    manifest = read_object(directory / "manifest.json", MANIFEST)
    loading: dict[str, Any] = {"dtype": "auto", "loader": config.loader, "device": "cpu"}
    loading |= {"trust_remote_code": config.trust_remote_code, "server": config.server}
    source = state_source(False, target, None, loading)
    identity, before = source.drafter.identity, manifest.get("target") or {}
    recorded = manifest.get("config") or manifest.get("imported") or {}
    is_new = not before or bool(compare_identity({"model": identity}, {"model": before}))
    # The manifest of a head that was bound before names the target that it was trained for.
    trained_for = manifest.get("bound") or {"from": recorded.get("target"), "identity": before}
    check_tokenizer(manifest.get("models", {}).get("tokenizer"), recorded.get("target"), source.checkpoint)
    info, settings = source.drafter.lm.info, head_settings(directory, config_json)
    check_sizes("head", config.directory, settings, info.hidden_size, info.vocab_size)
    state = read_tensors(weights_file(directory))
    take_tied(manifest.get("tied_to_target", ()), state, source)
    head = build_head(kind, settings, state)
    check_aux_layers(head.aux_layers, info.num_layers)
    check_num_layers(recorded.get("target"), source.checkpoint)

    kept = {name: value for name, value in manifest.items() if name != "sha256"}
    if is_new:
        # Numbers of the training hold for the target that it was trained for.
        kept = {name: value for name, value in kept.items() if name not in ("metrics", "teacher")}
        for name in ("config", "imported"):
            if kept.get(name):
                kept[name] = {**kept[name], "target": target}
        models = {"target": identity, **source.checkpoint.tokenizer_identity}
        kept |= {"target": identity, "models": models, "bound": trained_for}
        if trained_for["identity"] and not compare_identity({"model": identity}, {"model": trained_for["identity"]}):
            del kept["bound"]  # it is back
    card = model_card(kind, {**kept, "head": head_fields(head)})
    save_head(config.output, head, kept, card, original_of(directory))
    print_text(f"{kind} head: {config.output}")
    if not is_new:
        print_text(f"  note: it is a head of {target} already, and copied as it is.")
    elif "bound" in kept:
        print_bound(config, kind)
    return config.output


def take_tied(names: Iterable[str], state: dict[str, Tensor], source: StateSource) -> None:
    """Take what a head has of its target, rows of the lm_head, from the new one."""
    for name in names:
        assert source.facts.lm_head is not None
        rows = source.facts.lm_head[state["d2t"]] if "d2t" in state else source.facts.lm_head
        state[name] = rows.to(state[name].dtype)


def check_tokenizer(recorded: str | None, old: str | None, new: Checkpoint) -> None:
    """Check that the tokens of a head's target have the same ids in a new one.

    recorded: hash of the old target's tokenizer, if it is known. old: path of that target.

    Raises:
        InputError: they have not, or cannot be compared.
    """
    if recorded in (None, new.tokenizer_identity["tokenizer"]):
        return
    vocabulary = None
    with suppress(InputError, OSError):
        vocabulary = Checkpoint(old).tokenizer.get_vocab() if old is not None else None
    if vocabulary is None:
        found = f"{new.path} with another tokenizer than the head was trained with, which is not here to compare"
    else:
        ids = new.tokenizer.get_vocab()
        moved = [token for token, number in vocabulary.items() if ids.get(token) != number]
        if not moved:
            return
        found = f"{new.path}, where {len(moved):,} tokens of {old} have another id, as {moved[0]!r}"
    raise InputError("target", found, "a target with the head's tokens", "Train a new head: draftsmith train.")


def check_num_layers(old: str | None, new: Checkpoint) -> None:
    """Raise InputError if the old target, where it is here, has another number of layers than the new one.

    A layer of the one may be the state after the final norm of the other.
    """
    layers = None
    with suppress(InputError, OSError):
        layers = Checkpoint(old).shape.num_layers if old is not None else None
    if layers not in (None, new.shape.num_layers):
        found, expected = f"{new.path}, of {new.shape.num_layers} layers", f"the {layers} layers of {old}"
        raise InputError("target", found, expected, "Train a new head: draftsmith train.")


def print_bound(config: ImportConfig, kind: str) -> None:
    """Print what is unknown of a head that was bound to another target, and what to do about it."""
    head, target = shlex.quote(str(config.output)), shlex.quote(config.target or "TARGET")
    print_text(f"  note: it was trained for another target than {target}: what was measured there does not hold.")
    print_text("Measure it, and train it on if it drafts badly:")
    print_text(f"  draftsmith eval bench --target {target} --head {head} --methods {kind} --data FILE --output DIR")
    print_text(f"  draftsmith train {kind} --init {head} --data DATA --target {target} --output DIR")


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
    """Print the result and the notes."""
    flag = "head" if format.predicts else "target"
    notes = list(imported.notes)
    if getattr(config, flag) is None:
        notes.append(f"no --{flag} was given: nothing is recorded of it, and other models are not refused")
    for problem in imported.problems:
        where = f"{problem.where}: {problem.text}"
        notes.append(f"{format.system} would not compute this head from the directory as it is: {where}")
    print_text(f"{format.kind} head in the format of {format.system}: {config.output}")
    for note in notes:
        print_text(f"  note: {note}")


def _print_next(config: ImportConfig, format: HeadFormat, imported: ImportedHead) -> None:
    """Print the next commands."""
    out, given = shlex.quote(str(config.output)), config.head if format.predicts else config.target
    print_text("Next:")
    if format.predicts:
        models = f"--target TARGET --head {shlex.quote(given) if given else 'HEAD'} --acceptance {out}"
        print_text(f"  draftsmith eval bench {models} --methods specdec++:h=0.7 --data FILE")
        return
    path = shlex.quote(given) if given else "TARGET"
    if not imported.problems:
        print_text(f"  draftsmith check {shlex.quote(config.directory)} --format {format.name} --target {path}")
    elif format.holds(imported.config):
        print_text(f"  draftsmith export --format {format.name} --head {out} --target {path} --output DIR")
    count = num_drafted(None, format.kind, getattr(imported.config, "drafts", None))
    method = f"{format.kind}:k={count}"
    print_text(f"  draftsmith eval bench --target {path} --head {out} --methods {method} --data FILE")

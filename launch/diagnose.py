"""`draftsmith diagnose`: why a head's acceptance is low, and the head written as it should be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.console import log_note, print_text
from draftsmith.data.engines.own import generate_all
from draftsmith.data.engines.served_target import load_target
from draftsmith.data.store.manifest import Manifest, agree, joined_digest, open_artifact
from draftsmith.data.store.parts import parts_of
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.writer import occupied, writing_alone
from draftsmith.eval.diagnose.diagnosis import diagnose
from draftsmith.eval.diagnose.drafts import STRONG, answered, known_rope, mask_tokens
from draftsmith.eval.diagnose.repair import search
from draftsmith.eval.settings import DiagnoseConfig
from draftsmith.launch.export.export import GGUF_HEAD, ExportConfig
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.import_head import ImportConfig
from draftsmith.launch.export.import_head import run as import_head
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.formats import formats, formats_of
from draftsmith.modules.formats.base import HeadFormat
from draftsmith.modules.formats.gguf import head_to_gguf
from draftsmith.modules.pretrained.card import model_card
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import (
    head_config,
    head_directory,
    head_fields,
    kind_at,
    load_draft_head,
    save_head,
    stored_tensors,
)
from draftsmith.modules.pretrained.provenance import flatten
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError, SamplingParams

DECLARED, REPAIRED, FILES = "as-declared", "repaired", "files"
LIMIT, LIMIT_TO_WRITE = 200, 24  # rows
ANSWERS_TOGETHER = 16


def run(config: DiagnoseConfig) -> int:
    """Print the diagnosis of a head; with --write print what is wrong in its files and write it corrected.

    Returns 1 if --write found nothing in a head that drafts badly, or the corrected files differ from it; else 0.

    Raises:
        InputError: no draft head, another target's, or data without answers or of another tokenizer; an output that
            exists.
    """
    if config.write is not None:
        with writing_alone(config.write):
            return repair(config, config.write)
    config, checkpoint = config.open(config.target)
    rows, manifest = read_rows(config, checkpoint, ("responses", "features", "prompts"), LIMIT, "size")
    if "input_ids" not in {spec.name for spec in manifest.fields}:
        remedy = "Make responses first (data responses)."
        raise InputError("data", "prompts without answers", "answers", remedy)
    # Its errors come before the target is loaded.
    head_config(config.head)
    target = load_target(checkpoint, **config.loading)
    print_text(diagnose(head_directory(config.head).resolve(), target, rows, manifest))
    return 0


def read_rows(
    config: DiagnoseConfig, target: Checkpoint, kinds: tuple[str, ...], limit: int, check: str = "sha256"
) -> tuple[list[dict[str, Any]], Manifest]:
    """Read the first rows of the data, of joined artifacts as many of each as its share of an epoch is; and what their
    manifests say together."""
    parts, rows = parts_of(config.data), list[dict[str, Any]]()
    manifests = [open_artifact(part.path, kinds, target.text_identity(), check) for part in parts]
    manifest, _ = agree(parts, manifests), joined_digest(parts, manifests)
    epochs = [part.weight * len(Rows(one)) for part, one in zip(parts, manifests, strict=True)]
    for one, epoch in zip(manifests, epochs, strict=True):
        count = max(1, round((config.limit or limit) * epoch / sum(epochs)))
        rows += Rows(one, limit=count, vocab_size=target.shape.vocab_size).iterate()
    return rows, manifest


def repair(config: DiagnoseConfig, output: Path) -> int:
    """Print what is wrong and write the corrected head; return 0 if nothing is, or all was corrected, else 1."""
    if occupied(output):
        raise InputError("write", f"{output}, which exists", "a new directory", "Choose another, or remove it.")
    directory = head_directory(config.head).resolve()
    ours = kind_at(directory) is not None
    if not ours:
        served: Any = {"loader": config.loader, "server": config.server}
        declared, its_target = ImportConfig(config.head, output / DECLARED, config.target, **served), True
        directory = import_head(declared, its_target)
    config, checkpoint = config.open(config.target)
    target = load_target(checkpoint, **config.loading)
    head, manifest = load_draft_head(directory, target), read_object(directory / "manifest.json", {})
    rows, data = read_rows(config, checkpoint, ("responses", "prompts"), LIMIT_TO_WRITE)
    if "input_ids" not in {spec.name for spec in data.fields}:
        prompts = [row["prompt_ids"] for row in rows]
        answers = generate_all(target, prompts, SamplingParams(), config.max_new_tokens, ANSWERS_TOGETHER)
        rows = answered(prompts, answers)
    rope, masks = known_rope(target), mask_tokens(head, target)
    repaired, corrections, first = search(head, rope, target, rows, masks)

    # What `import` corrected, since the head's own system would read it otherwise.
    misread = [] if ours else manifest["imported"]["problems"]
    for wrong in (*misread, *(correction.text for correction in corrections)):
        print_text(f"WRONG {wrong}")
    if not corrections and not misread:
        weak = f"a weak head, or another target's: train it on, or check --target (below {STRONG:.0%} nothing is sure)"
        print_text(f"No reading drafts better than the files': accepted at place 1: {first}.")
        print_text("Nothing to repair." if first.value >= STRONG else f"Nothing to repair: {weak}.")
        return 0 if first.value >= STRONG else 1
    made = {**manifest, "repaired": [dataclasses.asdict(correction) for correction in corrections]}
    card = model_card(repaired.kind, {**made, "head": head_fields(repaired)})
    saved = save_head(output / REPAIRED, repaired, made, card)
    log_note(f"The repaired head: {saved}")
    if ours:
        return 0
    format = formats()[manifest["imported"]["producer"], head.kind]
    if not format.writes:
        names = ", ".join(other.name for other in formats_of(head.kind)) or "no system"
        log_note(
            f"{format.name} is only read, so no files are written. `draftsmith export` writes the head for: {names}"
        )
        return 0
    name: Any = format.name
    model: Any = {"target": config.target, "server": config.server, "dtype": config.dtype}
    files = ExportConfig(format=name, output=output / FILES, head=saved, **model)
    if code := export(files):
        return code
    print_text("\n".join(f"CHANGED {one}" for one in changed_fields(format, head, repaired)))
    return 0


def changed_fields(format: HeadFormat, declared: DraftHead, corrected: DraftHead) -> list[str]:
    """Return what differs between two heads in the files of a format: settings, and tensors by name."""
    # Without the target's facts, which would leave out what servers take as given.
    was, now = (format.write(head.config, stored_tensors(head), torch.float32) for head in (declared, corrected))
    if "gguf" in was.config:
        file, (before, after) = GGUF_HEAD, (head_to_gguf(package)[0] for package in (was, now))
    else:
        file, (before, after) = "config.json", (flatten(package.config) for package in (was, now))
    changed = [
        f"{file} {name}: {before.get(name)!r}, should be {after.get(name)!r}"
        for name in before | after
        if before.get(name) != after.get(name)
    ]
    tensors = [name for name, tensor in was.tensors.items() if not torch.equal(tensor, now.tensors[name])]
    return changed + [f"weights {', '.join(tensors)}"] * bool(tensors)

"""`draftsmith check`: compare what another system computes from a directory with the head that was trained."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.data.console import print_text
from draftsmith.eval.check.report import CheckReport, Measure, print_report
from draftsmith.eval.check.states import StateSource, answered_prompts, state_source, states_after
from draftsmith.eval.diagnose.drafts import (
    COMPARED,
    HeadVariant,
    better_variants,
    head_variants,
    known_rope,
    longest_draft,
    right,
)
from draftsmith.eval.diagnose.drafts import measure as measure_texts
from draftsmith.eval.settings import CheckConfig
from draftsmith.modules.drafters import learned
from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.drafters.branches import BranchDrafter
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import HeadFormat, ImportedHead, Problem, largest
from draftsmith.modules.formats.foreign import ForeignHead, detect, named_format
from draftsmith.modules.formats.llama import frequencies
from draftsmith.modules.layers import RopeScaling, RotarySettings
from draftsmith.modules.pretrained.directory import foreign_package
from draftsmith.modules.pretrained.heads import build_head, load_head
from draftsmith.modules.pretrained.provenance import compare_identity
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

RECORD = "draftsmith.json"
# Two float32 implementations of one layer; another rope, order or bias changes logits by tenths at least.
LARGEST_DIFFERENCE = 1e-4
LARGEST_SHARE = 1e-5  # of the largest logit, if that is more: a draft reads its own rounded states


def run(config: CheckConfig) -> int:
    """Check a directory. Returns 0 if the system would compute with it what was trained, else 1.

    Raises:
        InputError: no such directory, one of our own heads, or no model.
    """
    models = (config.target, config.draft, config.loading)
    # All formats of a name read the same model: a missing --target is reported before the directory is read.
    named = next((format for (name, _), format in formats().items() if name == config.format), None)
    source = state_source(named, *models) if named else None
    foreign = ForeignHead.of(foreign_package(config.directory))
    format = named_format(config.format, foreign) if named else detect(foreign)
    source = source or state_source(format, *models)
    head = original(config.head, format.kind, source) if config.head is not None else None
    report = check_head(config.directory, format, source, head)
    print_report(report, str(config.directory), format.name)
    if config.format == "auto":
        print_text(f"\nWritten as {format.system} does.")
        for other in formats().values():
            if other.kind == format.kind:
                # Only beside the head itself a forward shows more than names and settings.
                read = check_head(config.directory, other, source, head, forward=head is not None)
                lines = (report if other is format else read).failures
                more = f", and {len(lines) - 1} more" if len(lines) > 1 else ""
                verdict = f"another head, or none ({lines[0]}{more})" if lines else "computes this head"
                print_text(f"  {other.name}: {verdict}")
    return 1 if report.failures else 0


def original(directory: Path, kind: str, source: StateSource) -> nn.Module:
    """Load a head as it was trained, in the type of its file.

    Raises:
        InputError: no head of this kind, or one that reads another model's states.
    """
    # The first call compares identities; its head is in the model's type, which rounds.
    load_head(directory, source.drafter.lm, kind=kind, identity=source.drafter.identity)
    return load_head(directory)


def check_head(
    directory: Path, format: HeadFormat, source: StateSource, head: nn.Module | None, forward: bool = True
) -> CheckReport:
    """Read a directory by a system's rules, and compare it with its record and with the head, if there are such.

    forward: run it on real text.
    """
    report, package = CheckReport(), foreign_package(directory)
    try:
        theirs = format.read(package, source.facts)
        net = build_head(format.kind, theirs.config, theirs.state)
    except InputError as error:
        report.problems.append(Problem(error.field, str(error).partition(": ")[2]))
        return report
    report.problems += theirs.problems
    report.notes += theirs.notes
    if (record := read_record(directory)) is not None:
        if record["kind"] != format.kind:
            report.problems.append(Problem(RECORD, f"this was exported as {record['format']}"))
        else:
            report.problems += differences(record["config"], record["tensors"], theirs)
        other = "is another than the model that the head was trained for"
        differing = against_model(record, source.drafter.identity)
        report.problems += [Problem(f"the model's {key}", other) for key in differing]
    report.measures += measure(format, net, head, source) if forward else []
    return report


@torch.inference_mode()
def measure(format: HeadFormat, theirs: Any, ours: Any | None, source: StateSource) -> list[Measure]:
    """Run the head as a system reads it on text of the model, and compare its outputs with those of ours."""
    lm, heads = source.drafter.lm, [head for head in (theirs, ours) if head is not None]
    longest = min([lm.info.max_position, *(getattr(head.config, "max_position", 2**62) for head in heads)])
    texts = answered_prompts(source.path, lm, longest)
    if format.predicts:
        states = states_after(texts, source)
        prob, *others = [torch.sigmoid(head.float()(states)) for head in heads]  # [N]
        low, high = float(prob.min()), float(prob.max())
        text = f"P(accept) from {low:.3f} to {high:.3f}"
        measures = [Measure(f"{prob.numel()} states", text, "not all the same", low < high)]
        return measures + [difference(f"P(accept) of {prob.numel()} states", [(prob, other)]) for other in others]

    heads = [head.to(lm.device, lm.dtype).eval() for head in heads]
    variants = [HeadVariant("", "as it is", head, head.aux_layers or (lm.info.num_layers,)) for head in heads]
    if ours is None:
        variants = head_variants(theirs, known_rope(lm, source.path), lm.info.num_layers, in_files=True)
    depth = longest_draft(COMPARED, variants)
    try:
        as_it_is, *others = measure_texts(lm, texts, variants, depth).lengths
    except NonFinite as error:
        return [Measure("first tokens", str(error), "all are numbers", False)]
    text = f"{right(as_it_is):.1%} of {len(as_it_is)} as the target's"
    measures = [Measure("first tokens", text, "all are numbers", True)]
    if ours is not None:
        pairs = [pair for text in texts for pair in outputs_along(lm, text, heads, depth)]
        return [*measures, difference(f"logits of {sum(len(one) for one, _ in pairs)} rows", pairs)]
    lengths = {variant.label: own for variant, own in zip(variants[1:], others, strict=True)}
    for label in better_variants(as_it_is, lengths, isinstance(theirs.config, BlockConfig)):
        text = f"{right(lengths[label]):.1%}, first two tokens {right(lengths[label], 2):.1%}"
        measures.append(Measure(f"read with {label}", text, "no better than as it says", False))
    return measures


def outputs_along(
    lm: CausalLM, text: Mapping[str, Any], heads: Sequence[Any], depth: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [N, V], and log-odds [N] of confidence heads, of two heads along drafts of `depth` tokens.

    A draft is followed as long as both heads read the same tokens.
    """
    ids, sides = torch.tensor(text["input_ids"]), list[tuple[Tensor, list[list[Tensor]]]]()
    for head in heads:
        branches = BranchDrafter(head.net(lm), depth)
        starts = torch.arange(max(text["loss_mask"].index(True) + 1, branches.min_start), len(ids) + 1)
        branches.open(ids.tolist(), lm.features(ids[None].to(lm.device), aux_layers=head.aux_layers)[0])
        drafted = branches.draft(starts.tolist(), depth, [SamplingParams()] * len(starts))
        read = torch.cat([ids[starts - 1][:, None], drafted.tokens[:, :-1].cpu()], 1)  # [S, K]
        outputs = []
        for level, hidden in enumerate(drafted.hidden.unbind(1)):
            outputs.append([branches.lm_head(hidden, level).float()])
            if getattr(head.config, "confidence", False):
                states = hidden[:, : head.config.hidden_size]
                outputs[-1].append(head.confidence(states, read[:, level].to(lm.device)).float())
        sides.append((read, outputs))
    (read, ours), (other_read, theirs) = sides
    same = (read == other_read).cumprod(1).bool()  # [S, K]
    for level, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        rows = same[:, level].to(lm.device)
        yield from ((a[rows], b[rows]) for a, b in zip(one, two, strict=False))


def difference(name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Measure:
    """Compare two heads' outputs."""
    # Tokens that a head cannot draft have -inf.
    worst = max((largest(torch.where(one == two, 0.0, one - two)) for one, two in pairs), default=0.0)
    size = max((largest(two[two.isfinite()]) for _, two in pairs), default=0.0)
    bar = max(LARGEST_DIFFERENCE, LARGEST_SHARE * size)
    return Measure(name, f"differ by {worst:.1e}", f"at most {bar:.2g}", worst <= bar)


def hashes_of(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a hash of every tensor's shape and values."""
    hashes = {}
    for name, tensor in sorted(state.items()):
        # In float32, whatever type they are stored in: a copy of another type that holds the same is the same.
        data = tensor.detach().to("cpu", torch.float32).contiguous()
        content = str(tuple(data.shape)).encode() + data.view(torch.uint8).numpy().tobytes()
        hashes[name] = hashlib.sha256(content).hexdigest()[:16]
    return hashes


def read_record(directory: Path) -> dict[str, Any] | None:
    """Read the record of an export; None for a directory that this project did not write.

    Raises:
        InputError: a damaged file.
    """
    path = Path(directory) / RECORD
    if not path.exists():
        return None
    shape = {"format": str, "kind": str, "tensors": {"*": str}, "config": dict, "head": dict}
    return read_object(path, shape, "Export the head again.")


def differences(config: Mapping[str, Any], hashes: Mapping[str, str], head: ImportedHead) -> list[Problem]:
    """Compare a head, as a system reads it, with settings and tensor hashes of the head that was exported."""
    problems = []
    theirs = hashes_of(head.state)
    for name in sorted(hashes.keys() | theirs.keys()):
        if name not in theirs:
            problems.append(Problem(name, "was exported, and this system does not hold it"))
        elif name not in hashes:
            problems.append(Problem(name, "was not exported, and this system computes with it"))
        elif theirs[name] != hashes[name]:
            problems.append(Problem(name, "is not what was exported (other values, order or shape)"))
    read, exported = (
        {**fields.pop("llama", {}), **fields}
        for fields in json.loads(json.dumps([dataclasses.asdict(head.config), config]))
    )
    # An import raises the number of positions to the target's; rope is compared by its frequencies.
    skipped = {"max_position", "rope_theta", "rope_scaling", "tie_embeddings"}
    for name in sorted((exported.keys() | read.keys()) - skipped):
        if exported.get(name) != read.get(name):
            problems.append(Problem(name, f"{read.get(name)} in this system, exported with {exported.get(name)}"))
    if "llama" in config and (llama := getattr(head.config, "llama", None)) is not None:
        scaling = RopeScaling(**config["llama"]["rope_scaling"])
        rope = RotarySettings(config["llama"]["rope_theta"], scaling)
        if not torch.allclose(frequencies(llama), frequencies(llama, rope), rtol=1e-5):
            problems.append(Problem("rope", "other rotary frequencies than the head was exported with"))
    return problems


def against_model(
    record: Mapping[str, Any] | None, identity: Mapping[str, str], with_drafter: bool = True
) -> list[str]:
    """Return the names of the hashes by which a model is not the one that the head was trained for.

    record: None, or without a target, for a head of unknown origin. with_drafter: compare the hash of a drafting head,
    whose hidden states an acceptance head reads.
    """
    recorded = (record or {}).get("head", {}).get("target") or {}
    recorded = {key: value for key, value in recorded.items() if with_drafter or key not in learned()}
    differing = compare_identity({"model": identity}, {"model": recorded}) if recorded else []
    return [key.removeprefix("model.") for key, _, _ in differing]

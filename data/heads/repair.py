"""`draftsmith repair`: find the reading of a head's files under which it drafts best, and write the head as that.

Heads fail in servers without a word: layers counted from another one, another rotary base, rows of q and k in the order
of another convention, a switch that no tensor shows. A reading changes one of these (modules/formats/readings.py) and
drafts from every position of the target's answers, whose states are computed once for all of them; a paired sign test
says which drafts better than the files' own reading. What it finds is corrected, and the search goes on from there, so
that several mistakes are found one after the other; where no single change helps, pairs are tried.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.console import log_note, print_text
from draftsmith.data.engines.own import generate_all
from draftsmith.data.export.export import GGUF_HEAD, ExportConfig
from draftsmith.data.export.export import run as export
from draftsmith.data.export.import_head import ImportConfig
from draftsmith.data.export.import_head import run as import_head
from draftsmith.data.heads.card import model_card
from draftsmith.data.heads.diagnosis import (
    COMPARED,
    STRONG,
    HeadVariant,
    TextMeasures,
    better_variants,
    head_variants,
    known_rope,
    mask_tokens,
    measure,
    right,
)
from draftsmith.data.settings import Loading, check_positive
from draftsmith.data.store.manifest import open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.writer import occupied, sole_writer
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.formats import formats, formats_of
from draftsmith.modules.formats.base import HeadFormat
from draftsmith.modules.formats.gguf import head_to_gguf
from draftsmith.modules.layers import RotarySettings
from draftsmith.modules.pretrained.heads import head_fields, kind_at, load_draft_head, save_head, stored_tensors
from draftsmith.modules.pretrained.models import load_lm, vocabulary_size
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.pretrained.tokenizers import text_identity
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams

MOST_MISTAKES = 3
PAIRED = 4  # readings of a factor that are paired with others: each costs a draft of all answers
ANSWERS_TOGETHER = 16
DECLARED, REPAIRED, FILES = "as-declared", "repaired", "files"


@dataclass(frozen=True)
class RepairConfig(Loading):
    """Find what is wrong in a head's files, by how it drafts under every plausible reading, and write it corrected.

    Attributes:
        directory: The head: one of ours, or of another system as for `import`.
        target: The model that it drafts for: a directory, hub id or GGUF file.
        data: Output of `data responses`, or of `data prompts`, which the target then answers here, greedily.
        output: Directory that receives the head as declared (where it is another system's), repaired, and, as `files`,
            in the format that it came in, if that is one that `export` writes.
        limit: Answers to draft on.
        max_new_tokens: Length of the answers that are made here.
    """

    directory: str
    target: str
    data: Path
    output: Path
    limit: int = 24
    max_new_tokens: int = 96

    def __post_init__(self) -> None:
        check_positive(self, "limit", "max_new_tokens")


@dataclass(frozen=True)
class Share:
    """Share of drafts whose first tokens are right. half: of its 95 % interval, by texts."""

    value: float
    half: float

    @classmethod
    def of(cls, measured: TextMeasures, number: int, depth: int) -> Share:
        """Measure the drafts of a reading over their first `depth` tokens; those of a text are not independent."""
        lengths, per_text = measured.lengths[number], measured.per_text
        hits, value = (lengths >= depth).double(), right(lengths, depth)
        off = torch.stack([(part - value).sum() for part in hits.split(per_text)])
        return cls(value, 1.96 * float(off.square().sum().sqrt()) / len(hits))

    def __str__(self) -> str:
        return f"{self.value:.1%} ({max(0.0, self.value - self.half):.1%} to {min(1.0, self.value + self.half):.1%})"


@dataclass(frozen=True)
class Correction:
    """A change of the reading, and how the head drafts before and after it, by the first `depth` tokens."""

    factor: str
    label: str
    depth: int
    before: Share
    after: Share

    @property
    def text(self) -> str:
        tokens = "first tokens" if self.depth == 1 else f"first {self.depth} tokens"
        return f"{self.factor}: {self.label}; {tokens} right {self.before} before, {self.after} so"


@sole_writer()
def run(config: RepairConfig) -> int:
    """Print what is wrong and write the corrected head; return 0 if nothing is, or all was corrected, else 1.

    Raises:
        InputError: no head that is read, or another target's; an output that exists.
    """
    if occupied(config.output):
        raise InputError("output", f"{config.output}, which exists", "a new directory", "Choose another, or remove it.")
    directory, ours = Path(config.directory), kind_at(config.directory) is not None
    if not ours:
        directory = import_head(
            ImportConfig(config.directory, config.output / DECLARED, config.target, engine=config.engine)
        )
    target = load_lm(config.target, **config.loading)
    head, manifest = load_draft_head(directory, target), read_object(directory / "manifest.json", {})
    rope = known_rope(target, config.target)
    rows, masks = answers(config, target), mask_tokens(head, config.target)
    repaired, corrections, first = search(head, rope, target, rows, masks)

    # What `import` corrected, since the head's own system would read it otherwise.
    misread = [] if ours else manifest["imported"]["problems"]
    for wrong in (*misread, *(correction.text for correction in corrections)):
        print_text(f"WRONG {wrong}")
    if not corrections and not misread:
        weak = f"a weak head, or another target's: train it on, or check --target (below {STRONG:.0%} nothing is sure)"
        print_text(f"No reading drafts better than the files': first tokens right {first}.")
        print_text("Nothing to repair." if first.value >= STRONG else f"Nothing to repair: {weak}.")
        return 0 if first.value >= STRONG else 1
    made = {**manifest, "repaired": [dataclasses.asdict(correction) for correction in corrections]}
    card = model_card(repaired.kind, {**made, "head": head_fields(repaired)})
    saved = save_head(config.output / REPAIRED, repaired, made, card)
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
    files = ExportConfig(
        format=format.name, output=config.output / FILES, head=saved, target=config.target, dtype=config.dtype
    )
    if code := export(files):
        return code
    print_text("\n".join(f"CHANGED {one}" for one in differences(format, head, repaired)))
    return 0


def answers(config: RepairConfig, target: CausalLM) -> list[dict[str, Any]]:
    """Read answers of the target, or make them: rows with input_ids and loss_mask."""
    manifest = open_artifact(config.data, ("responses", "prompts"), text_identity(config.target))
    rows = list(Rows(config.data, manifest, None, config.limit, vocabulary_size(config.target)).iterate())
    if "input_ids" in {spec.name for spec in manifest.fields}:
        return rows
    prompts = [row["prompt_ids"] for row in rows]
    made = generate_all(target, prompts, SamplingParams(), config.max_new_tokens, ANSWERS_TOGETHER)
    return [
        {"input_ids": [*prompt, *answer], "loss_mask": [False] * len(prompt) + [True] * len(answer)}
        for prompt, answer in zip(prompts, made, strict=True)
    ]


def search(
    head: DraftHead,
    rope: RotarySettings | None,
    target: CausalLM,
    rows: Sequence[Mapping[str, Any]],
    masks: Sequence[int] = (),
) -> tuple[DraftHead, list[Correction], Share]:
    """Return the head under its best reading, what that changes, and the share of right first tokens as it was read."""
    corrections: list[Correction] = []
    found, first = head, Share(0.0, 0.0)

    def variants_of(head: DraftHead) -> list[HeadVariant]:
        return head_variants(head, rope, target.info.num_layers, masks, in_files=True)

    for _ in range(MOST_MISTAKES):
        variants = variants_of(found)
        best, measured = best_of(variants, target, rows)
        if not corrections:
            first = Share.of(measured, 0, 1)
        if best is None and not corrections and first.value < STRONG:
            variants = [variants[0], *pairs_of(variants[1:], variants_of)]
            best, measured = best_of(variants, target, rows)
        if best is None:
            break
        chosen = variants[best]
        depth = COMPARED if isinstance(found.config, BlockConfig) else 1
        before, after = (Share.of(measured, number, depth) for number in (0, best))
        corrections.append(Correction(chosen.factor, chosen.label, depth, before, after))
        found = chosen.head
    return found, corrections, first


def best_of(
    variants: Sequence[HeadVariant], target: CausalLM, rows: Sequence[Mapping[str, Any]]
) -> tuple[int | None, TextMeasures]:
    """Return the number of the variant that drafts best, if it is better than the first, and what was measured."""
    measured = measure(target, rows, variants, COMPARED)
    others = {str(number): own for number, own in enumerate(measured.lengths) if number}
    better = better_variants(measured.lengths[0], others, isinstance(variants[0].head.config, BlockConfig))
    return (int(better[0]) if better else None), measured


def pairs_of(
    singles: Sequence[HeadVariant], variants_of: Callable[[DraftHead], list[HeadVariant]]
) -> Iterator[HeadVariant]:
    """Yield readings with two changes of different kinds, of the first few of each kind."""
    kinds = list(dict.fromkeys(single.factor for single in singles))
    for single in first_of_each(singles):
        for second in first_of_each(variants_of(single.head)):
            if second.factor in kinds[kinds.index(single.factor) + 1 :]:
                label, factor = f"{single.label}, {second.label}", f"{single.factor}, {second.factor}"
                yield dataclasses.replace(second, label=label, factor=factor)


def first_of_each(variants: Iterable[HeadVariant]) -> Iterator[HeadVariant]:
    """Yield the first few variants of each factor."""
    seen: Counter[str] = Counter()
    for variant in variants:
        seen[variant.factor] += 1
        if seen[variant.factor] <= PAIRED:
            yield variant


def differences(format: HeadFormat, declared: DraftHead, corrected: DraftHead) -> list[str]:
    """Say what differs between two heads in the files of a format: settings, and tensors by name."""
    # Without the target's facts, which would leave out what servers take as given.
    was, now = (format.write(head.config, stored_tensors(head), torch.float32) for head in (declared, corrected))
    if "gguf" in was.config:
        file, (before, after) = GGUF_HEAD, (head_to_gguf(package)[0] for package in (was, now))
    else:
        file, (before, after) = "config.json", (dict(leaves(package.config)) for package in (was, now))
    changed = [
        f"{file} {name}: {before.get(name)!r}, should be {after.get(name)!r}"
        for name in before | after
        if before.get(name) != after.get(name)
    ]
    tensors = [name for name, tensor in was.tensors.items() if not torch.equal(tensor, now.tensors[name])]
    return changed + [f"weights {', '.join(tensors)}"] * bool(tensors)


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested objects by their dotted names."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value

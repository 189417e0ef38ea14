"""Search for the reading of a head's files under which it drafts best.

Heads fail in servers without a word: layers counted from another one, another rotary base, rows of q and k in the order
of another convention, a switch that no tensor shows. A reading changes one of these (modules/formats/readings.py) and
drafts from every position of the target's answers, whose states are computed once for all of them; a paired sign test
says which drafts better than the files' own reading. What it finds is corrected, and the search goes on from there, so
that several mistakes are found one after the other; where no single change helps, pairs are tried.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from draftsmith.eval.diagnose.drafts import (
    COMPARED,
    STRONG,
    HeadVariant,
    Rows,
    TextMeasures,
    better_variants,
    head_variants,
    measure,
)
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.llama_config import RotarySettings
from draftsmith.modules.targets.base import CausalLM

MOST_MISTAKES = 3
PAIRED = 4  # readings of a factor that are paired with others: each costs a draft of all answers


@dataclass(frozen=True)
class Share:
    """Share of drafts that are accepted up to a place. half: of its 95 % interval, by texts."""

    value: float
    half: float

    @classmethod
    def of(cls, measured: TextMeasures, number: int, depth: int) -> Share:
        """Measure the drafts of a reading over their first `depth` tokens; those of a text are not independent."""
        drafts, value = measured.drafts[number], measured.drafts[number].share(depth)
        # What each draft moves the product of the shares by place, to the first order.
        moves = torch.zeros(len(drafts.accepted), dtype=torch.float64)
        for place, (hits, count) in enumerate(drafts.counts(depth), 1):
            off = (drafts.accepted >= place).double() - hits / max(1, count) * (drafts.compared >= place)
            moves += value / max(1, hits) * off
        by_text = torch.stack([part.sum() for part in moves.split(measured.per_text)])
        return cls(value, 1.96 * float(by_text.square().sum().sqrt()))

    def __str__(self) -> str:
        return f"{self.value:.1%} ({max(0.0, self.value - self.half):.1%} to {min(1.0, self.value + self.half):.1%})"


@dataclass(frozen=True)
class Correction:
    """A change of the reading, and what is accepted up to place `depth` of drafts before and after it."""

    factor: str
    label: str
    depth: int
    before: Share
    after: Share

    @property
    def text(self) -> str:
        return f"{self.factor}: {self.label}; accepted at place {self.depth}: {self.before} before, {self.after} so"


def search(
    head: DraftHead,
    rope: RotarySettings | None,
    target: CausalLM,
    rows: Rows,
    masks: Sequence[int] = (),
) -> tuple[DraftHead, list[Correction], Share]:
    """Return the head under its best reading, what that changes, and what is accepted at place 1 as it was read."""
    corrections: list[Correction] = []
    found, first = head, Share(0.0, 0.0)

    def variants_of(head: DraftHead) -> list[HeadVariant]:
        return head_variants(head, rope, target, masks, in_files=True)

    for _ in range(MOST_MISTAKES):
        variants = variants_of(found)
        best, measured = best_of(variants, target, rows)
        if not corrections:
            first = Share.of(measured, 0, 1)
        if best is None and not corrections and first.value < STRONG:
            variants = [variants[0], *pairs_of(variants[1:], variants_of)]
            best, measured = best_of(variants, target, rows)
            # Among so many readings of a head that is weak, and right, one drafts a little better.
            if best is not None and Share.of(measured, best, 1).value < STRONG:
                best = None
        if best is None:
            break
        chosen = variants[best]
        same_first = torch.equal(*(measured.drafts[number].accepted > 0 for number in (0, best)))
        depth = COMPARED if same_first or isinstance(found.config, BlockConfig) else 1
        before, after = (Share.of(measured, number, depth) for number in (0, best))
        corrections.append(Correction(chosen.factor, chosen.label, depth, before, after))
        found = chosen.head
    return found, corrections, first


def best_of(variants: Sequence[HeadVariant], target: CausalLM, rows: Rows) -> tuple[int | None, TextMeasures]:
    """Return the number of the variant that drafts best, if it is better than the first, and what was measured."""
    measured = measure(target, rows, variants, COMPARED)
    others = {str(number): own for number, own in enumerate(measured.drafts) if number}
    better = better_variants(measured.drafts[0], others, isinstance(variants[0].head.config, BlockConfig))
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

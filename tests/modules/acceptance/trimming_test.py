"""Servers that verify fewer tokens than they drew: what they may look at, by enumeration of every draft and verdict.

Dropping a token by what it is changes the output, as a rejected one's place is drawn from what the target has more of
than the draft, and a dropped one's from all of the target's distribution. What stood before it was drawn may decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import pytest
import torch
from table_models import Branches, H, TableLM, V, enumerate_branches, total_variation, warped

from draftsmith.modules.acceptance.head import SEES_TOKEN, AcceptanceHead, AcceptanceHeadConfig, Feature
from draftsmith.modules.acceptance.predictor import HeadPredictor
from draftsmith.modules.decoding.protocols import DraftTree, DraftView
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.types import SamplingParams

EXACT, CAUGHT = 1e-10, 1e-3
PARAMS, DRAWN = SamplingParams(1.0), 2
# Suffixes of it stood in it before, and go on in several ways.
TEXT = (2, 0, 1, 3, 2, 0, 3, 1, 2, 0)
FEATURES: tuple[Feature, ...] = get_args(Feature)
BLIND = tuple(name for name in FEATURES if name not in SEES_TOKEN)
Trim = Callable[[list[DraftView]], int]  # tokens that stay


def table(seed: int) -> TableLM:
    """Return a table model that gives every token some mass."""
    return TableLM(seed, support=(V,))


def a_draft(draft: TableLM, source: Branches, count: int = DRAWN) -> list[DraftView]:
    """Draw a draft; return the views of its tokens."""
    views: list[DraftView] = []
    for number in range(1, count + 1):
        logits, state = draft.row((*TEXT, *(view.token for view in views)))
        q = torch.tensor(warped(logits, PARAMS), dtype=torch.float64)
        views.append(DraftView(number, source.draw(q), state[None], logits, q, PARAMS.temperature, TEXT))
    return views


def text_of(target: TableLM, tokens: tuple[int, ...], length: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield the texts of so many tokens that start with these, with their probabilities."""
    if len(tokens) == length:
        yield tokens, 1.0
        return
    for token, p in enumerate(warped(target.row((*TEXT, *tokens))[0], PARAMS)):
        for text, rest in text_of(target, (*tokens, token), length) if p else ():
            yield text, p * rest


def bias(trim: Trim, target: TableLM, draft: TableLM, count: int = DRAWN) -> float:
    """Total variation between the target's next tokens, and those of a round of which `trim` drops some before they are
    verified, completed by the target."""

    def round_of(source: Branches) -> tuple[int, ...]:
        views = a_draft(draft, source, count)
        kept = views[: trim(views)]
        tokens = tuple(view.token for view in kept)
        prob = torch.stack([view.draft_prob for view in kept]) if kept else None
        tree = DraftTree(tokens, tuple(range(-1, len(kept) - 1)), prob)
        logits = torch.stack([target.row((*TEXT, *tokens[:place]))[0] for place in range(len(kept) + 1)])
        (verdict,) = verify([tree], logits[None], PARAMS, [source])
        return (*(tokens[node] for node in verdict.path), verdict.next_token)

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for emitted, weight in enumerate_branches(round_of):
        for text, rest in text_of(target, emitted, count + 1):
            found[text] += weight * rest
    return total_variation(found, dict(text_of(target, (), count + 1)))


def a_head(seed: int, **settings) -> AcceptanceHead:
    torch.manual_seed(seed)
    head = AcceptanceHead(AcceptanceHeadConfig(H, num_blocks=1, **settings)).requires_grad_(False)
    for weight in head.parameters():
        weight.normal_()
    return head


def trims(head: AcceptanceHead, draft: TableLM) -> dict[str, Trim]:
    """Return ways to drop tokens by a head's predictions for all drawn ones."""
    predictor = HeadPredictor(head, draft.embed)

    def said(views: Sequence[DraftView]) -> list[float]:
        predictor.reset()
        predictor.start_round()
        return [predictor.logit(view) for view in views]

    every = [logit for views, _ in enumerate_branches(lambda source: a_draft(draft, source)) for logit in said(views)]
    bar = sorted(every)[len(every) // 4]

    def before_the_first_low(views: list[DraftView]) -> int:
        return next((place for place, logit in enumerate(said(views)) if logit <= bar), len(views))

    def budget(views: list[DraftView]) -> int:
        """As many as are likely, wherever they stand."""
        return sum(logit > bar for logit in said(views))

    return {
        "own place": before_the_first_low,
        "from the next place on": lambda views: min(before_the_first_low(views) + 1, len(views)),
        "budget": budget,
    }


def test_dropping_a_token_by_its_value_biases_the_output():
    """p = (.7, .3), q = (.5, .5): dropping every b gives (.85, .15)."""
    target, draft = table(1), table(2)
    for lm, prob in ((target, [0.7, 0.3]), (draft, [0.5, 0.5])):
        logits = torch.full((V,), -torch.inf, dtype=torch.float64)
        logits[:2] = torch.tensor(prob, dtype=torch.float64).log()
        lm.row = lambda prefix, logits=logits: (logits, torch.zeros(H, dtype=torch.float64))
    assert bias(lambda views: int(views[0].token == 0), target, draft, 1) == pytest.approx(0.15)
    assert bias(lambda views: 1, target, draft, 1) < EXACT and bias(lambda views: 0, target, draft, 1) < EXACT


@pytest.mark.parametrize(("state", "features", "exact"), [
    ("undrawn", BLIND, {"own place", "from the next place on"}), ("before", FEATURES, {"from the next place on"}),
])  # fmt: skip
def test_an_undrawn_head_may_trim_its_own_place_and_others_the_next(state, features, exact):
    """Neither may trim by a budget, which depends on later tokens."""
    found: dict[str, list[float]] = defaultdict(list)
    kept: dict[str, set[int]] = defaultdict(set)
    for seed in range(1, 7):
        draft = table(seed + 100)
        for name, trim in trims(a_head(seed, state=state, features=features), draft).items():
            found[name].append(bias(trim, table(seed), draft))
            kept[name] |= {trim(views) for views, _ in enumerate_branches(lambda source, q=draft: a_draft(q, source))}
    assert kept == {name: {*range(name.startswith("from"), DRAWN + 1)} for name in found}
    assert {name for name, biases in found.items() if max(biases) < EXACT} == exact
    assert all(max(biases) > CAUGHT for name, biases in found.items() if name not in exact)

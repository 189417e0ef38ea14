"""The data stages' own loops, with a NaN in one model: labels at every position, drafts from every place, answers."""

from __future__ import annotations

import pytest
import torch
from broken_models import CONTEXT, models, small_lm

from draftsmith.data.engines.own import RowUniforms, generate_all
from draftsmith.data.labels import MixedTextLabels, Rollouts
from draftsmith.modules.finite import NonFinite, name_nonfinite
from draftsmith.modules.pretrained.heads import FrozenDrafter
from draftsmith.modules.types import SamplingParams

TEXTS = [[1, 5, 3, 1, 5, 2, 9], [7, 8, 3, 4], [2, 2, 6, 11, 13, 17]]
STARTS = [3, 1, 2]
MASKS = [[place >= start for place in range(len(text))] for text, start in zip(TEXTS, STARTS, strict=True)]
MODES = [SamplingParams(), SamplingParams(1.0), SamplingParams(0.5, 4, 0.9)]
LATE = ("embed_tokens.weight", (13, 0))  # of a token that only the last text holds, at position 4


def uniforms(count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("params", MODES, ids=str)
@pytest.mark.parametrize("broken", ["target", "draft"])
def test_labels_of_every_position(broken, params):
    lms = {name: small_lm(seed, LATE if name == broken else None) for name, seed in (("target", 1), ("draft", 2))}
    count = sum(map(sum, MASKS))
    with pytest.raises(NonFinite) as caught:
        MixedTextLabels(lms["target"], lms["draft"], params, 2, 4, 0).label(TEXTS, MASKS, uniforms(count))
    error = caught.value
    # A text is read at once, and what attention masks it multiplies by zero: its first label is none already.
    assert (error.model, error.row, error.position) == (broken, 2, STARTS[2])
    labels = MixedTextLabels(small_lm(1), small_lm(2), params, 2, 4, 0).label(TEXTS, MASKS, uniforms(count))
    assert labels["overlap"].isfinite().all() and len(labels["draft_ids"]) == count


@pytest.mark.parametrize("params", MODES, ids=str)
@pytest.mark.parametrize(
    ("broken", "drafting"), [("target", "draft"), ("target", "eagle"), ("draft", "draft"), ("eagle", "eagle")]
)
def test_labels_of_rounds(broken, drafting, params):
    text, start = TEXTS[2] * 2, 2
    found = models(broken)
    target = found.target
    drafter = FrozenDrafter(target, {}, found.heads["eagle"]) if drafting == "eagle" else FrozenDrafter(found.draft, {})
    row = {"id": "x", "input_ids": text, "loss_mask": [at >= start for at in range(len(text))], "turn": 1, "task": ""}
    how = Rollouts(target, drafter, 3, 1, (params,), 4, 0, CONTEXT)
    with pytest.raises(NonFinite) as caught, name_nonfinite(["row-0"]):
        how.label_response(drafter.branches(3), row, 0)
    assert caught.value.model == broken and caught.value.prompt == "row-0"
    assert caught.value.position == start + 1  # where drafts begin


@pytest.mark.parametrize("params", MODES, ids=str)
def test_answers(params):
    def drawn(number: int):
        return RowUniforms("test", 0, number)

    assert all(len(answer) == 8 for answer in generate_all(small_lm(1), TEXTS, params, 8, 2, drawn))
    target = small_lm(1, ("embed_tokens.weight", (8, 0)))  # which only the second prompt holds
    with pytest.raises(NonFinite) as caught:
        generate_all(target, TEXTS, params, 1, 2, drawn)
    assert (caught.value.model, caught.value.row, caught.value.position) == ("target", 1, 4)

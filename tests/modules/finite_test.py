"""Models with one NaN among their weights, in every method and in the loops of the data stages: an error that names the
model and the place, never a token. Small real models, so that the NaN takes the way that it takes in a large one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from worlds import SMALL, run_models, small_lm, small_models

from draftsmith.data.engines.own import RowUniforms, generate_all
from draftsmith.data.labels import MixedTextLabels, Rollouts
from draftsmith.modules.acceptance.head import HeadPredictor
from draftsmith.modules.decoding.chain import draft_ahead
from draftsmith.modules.decoding.drafter import Level
from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.decoding.plain import PromptAnswer, RowPool
from draftsmith.modules.decoding.stop import (
    ConfidenceStop,
    CostRule,
    DraftView,
    FixedLengthStop,
    PredictorStop,
    SelfVerifyStop,
    ThresholdRule,
)
from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.finite import NonFinite, name_nonfinite
from draftsmith.modules.pretrained.heads import FrozenDrafter
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import SamplingParams

PROMPT = [1, 5, 3, 1, 5]  # repeats itself, so that lookups draft
V, H, CONTEXT = SMALL.vocab_size, SMALL.hidden_size, SMALL.max_position
GREEDY, DRAWN = SamplingParams(), SamplingParams(1.0)
MODES = [GREEDY, SamplingParams(0.7, top_k=6, top_p=0.9), SamplingParams(1e-39)]
# Each drafter, stop and network, and which models with a NaN it meets besides the target.
BROKEN = {
    "ar": (),
    "spec:k=3": ("draft",),
    "specdec++:h=0.9:max=4": ("draft", "acceptance"),
    "specdec++:h=0.9:max=4:drafter=eagle": ("eagle", "acceptance"),
    "cost:c=0.1:max=4": ("draft", "acceptance"),
    "online:c=0.1:max=4": ("draft",),
    "confidence:t=0.1:max=4": ("draft",),
    "self-verify:k=3": ("draft",),
    "eagle:k=3": ("eagle",),
    "eagle-static": ("eagle",),
    "eagle-tree:nodes=6:depth=2:topk=3": ("eagle",),
    "eagle3:k=3": ("eagle3",),
    "mtp:k=3": ("mtp",),
    "dflash:k=3": ("dflash",),
    "dflash2:k=3": ("dflash2",),
    "dspark:k=3": ("dspark",),
    "dspark-confidence:k=3:t=0.01": ("dspark",),
    "medusa-static": ("medusa",),
    "hydra:k=3": ("hydra",),
    "pre-verify:k=2": ("draft", "mid"),
    "hsddw:k=2:max=4": ("draft", "mid"),
    "pld:k=3:ngram=1": (),
    "lookahead:w=3:n=3:g=3": (),
}
FEW = [
    "spec:k=3",
    "online:c=0.1:max=4",
    "eagle-tree:nodes=6:depth=2:topk=3",
    "medusa-static",
    "hsddw:k=2:max=4",
]


@pytest.mark.parametrize(
    ("label", "params"),
    [*((label, DRAWN) for label in BROKEN), *((label, mode) for label in FEW for mode in MODES if mode != DRAWN)],
)
def test_no_method_emits_a_token_of_a_model_with_a_nan(label, params):
    def decode(found: Models) -> Any:
        return generate_one(found.target, parse_method(label).build(found), PROMPT, params, 12, TorchSource(0), ())

    assert len(decode(small_models()).tokens) == 12  # whole models decode
    for broken in ("target", *BROKEN[label]):
        with pytest.raises(NonFinite) as caught:
            decode(small_models(broken))
        assert caught.value.model == broken and caught.value.row == 0
        # The target's is seen in the prefill, and M2's where it reads the prompt; a drafter's in its first draft, a
        # head's that reads states after their tokens one token later.
        first = len(PROMPT) + (broken not in ("target", "mid"))
        assert caught.value.position == first


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("rows", [False, True], ids=["drafted", "rows"])
def test_the_place_is_that_of_the_token_that_could_not_be_chosen(params, rows):
    """A NaN in the embedding of one token: everything up to reading it is as ever."""

    def decode(target: LlamaLM, draft: LlamaLM) -> list[int]:
        if rows:
            prompts = [[7, 8], PROMPT]
            waiting = [PromptAnswer(target.info, own, 8, TorchSource(3), (), i) for i, own in enumerate(prompts)]
            list(RowPool(target, params, 2, CONTEXT).run(waiting))
            return waiting[1].tokens
        drafter = ChainDrafter(DraftModelNet(draft), FixedLengthStop(3), CONTEXT)
        return generate_one(target, drafter, PROMPT, params, 8, TorchSource(3), ()).tokens

    target, draft = small_lm(1), small_lm(2)
    answer = decode(target, draft)
    new = next(i for i, token in enumerate(answer) if token not in (7, 8, *PROMPT, *answer[:i]))
    broken = small_lm(1, ("embed_tokens.weight", (answer[new], 0)))
    with pytest.raises(NonFinite) as caught:
        decode(broken, small_lm(1))  # a draft that is the target itself is accepted, so that drafts are read as well
    assert caught.value.model == "target" and caught.value.row == int(rows)
    assert caught.value.position >= len(PROMPT) + 1
    if params.greedy:  # else another draft takes other random numbers
        assert caught.value.position == len(PROMPT) + new + 1


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("label", ["ar", "spec:k=3", "eagle:k=3"])
def test_a_prompt_that_fails_leaves_nothing_to_the_next_ones(label, static):
    """Sessions and drafters serve prompt after prompt, and a mask multiplies what it hides by zero, NaN too."""
    rare = 20  # neither the answers nor their drafts come to it
    target, draft = (small_lm(seed, ("embed_tokens.weight", (rare, 0))) for seed in (1, 2))
    found = run_models(target, draft, eagle=small_models().heads["eagle"], capacity=CONTEXT)
    long, short = [1, 2, rare, 4, 5, 6, 7, 8, rare, 2, 3, 4, 5], [[1, 2], [3, 4, 5]]

    def in_rows(session: Any, drafter: Any, prompts: list[list[int]]) -> list[list[int]]:
        waiting = [PromptAnswer(target.info, prompt, 3, TorchSource(0), ()) for prompt in prompts]
        list(RowPool(target, GREEDY, 2, CONTEXT, session).run(waiting))
        return [one.tokens for one in waiting]

    def one(session: Any, drafter: Any, prompts: list[list[int]]) -> list[list[int]]:
        return [
            generate_one(target, drafter, prompt, GREEDY, 3, TorchSource(0), (), DecodeOptions(session=session)).tokens
            for prompt in prompts
        ]

    method = parse_method(label)
    for decode, rows in [(one, 1), *([(in_rows, 2)] if label == "ar" else [])]:
        aux_layers = getattr(method.build(found), "aux_layers", ())
        expected = decode(target.session(rows, CONTEXT, aux_layers, static=static), method.build(found), short)
        kept, drafter = target.session(rows, CONTEXT, aux_layers, static=static), method.build(found)
        with pytest.raises(NonFinite):
            decode(kept, drafter, [long, [3, 4]])
        assert decode(kept, drafter, short) == expected


@pytest.mark.parametrize("logits", [[math.nan, 1, 2], [1, math.inf, 2], [-math.inf] * 3, [1, 2, math.nan]], ids=str)
@pytest.mark.parametrize("params", MODES, ids=str)
def test_a_row_without_a_distribution_ends_the_walk_there(logits, params):
    """Below an accepted token, chains that were drawn and chains that were chosen."""
    rows = torch.tensor([[0.0, 60.0, 0.0], logits])
    distribution = torch.tensor([[0.0, 1.0, 0.0]])
    for tree in (DraftTree((1,), (-1,)), DraftTree((1,), (-1,), distribution)):
        with pytest.raises(NonFinite) as caught:
            verify(tree, rows, Sampler(params, TorchSource(0)))
        assert caught.value.position == 1
        with pytest.raises(NonFinite) as caught:
            verify(tree, rows.flip(0), Sampler(params, TorchSource(0)))
        assert caught.value.position == 0


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_chain_that_the_host_sees_at_its_end_names_the_place(params):
    """As on a GPU."""

    def expand(tokens: Any, parents: Any, depth: int) -> Level:
        return Level(torch.zeros(1, H), torch.full((1, V), math.nan if depth == 2 else 0.0))

    with pytest.raises(NonFinite) as caught:
        draft_ahead(expand(None, None, 0), expand, 4, Sampler(params, TorchSource(0)))
    assert caught.value.position == 2


def test_an_acceptance_heads_nan_is_an_error_and_a_policy_that_is_told_nan_stops():
    head = small_models("acceptance").acceptance
    view = DraftView(2, 3, torch.ones(1, H), torch.zeros(V), None)
    with pytest.raises(NonFinite) as caught:
        HeadPredictor(head).prob(view)
    assert caught.value.model == "acceptance"
    assert ThresholdRule(0.7).enough(math.nan, 0) and CostRule(0.1).enough(math.nan, 0)

    class Silent:
        late = learns = False
        learners = ()

        def start_round(self):
            pass

        def prob(self, view):
            return math.nan

    for rule in (ThresholdRule(0.7), CostRule(0.1)):
        stop = PredictorStop(Silent(), rule, 1, 8)
        stop.start_round()
        assert stop.should_stop(view)
    broken = DraftView(2, 3, torch.ones(1, H), torch.full((V,), math.nan), None)
    assert ConfidenceStop(0.4, 1, 8).should_stop(broken) and SelfVerifyStop(8).should_stop(broken)


# -- the loops of the data stages

TEXTS = [[1, 5, 3, 1, 5, 2, 9], [7, 8, 3, 4], [2, 2, 6, 11, 13, 17]]
STARTS = [3, 1, 2]
MASKS = [[place >= start for place in range(len(text))] for text, start in zip(TEXTS, STARTS, strict=True)]
LATE = ("embed_tokens.weight", (13, 0))  # of a token that only the last text holds, at position 4


def uniforms(count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("params", [GREEDY, MODES[1]], ids=str)
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
    assert labels["accept_prob"].isfinite().all() and len(labels["draft_ids"]) == count


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=str)
@pytest.mark.parametrize(
    ("broken", "drafting"), [("target", "draft"), ("target", "eagle"), ("draft", "draft"), ("eagle", "eagle")]
)
def test_labels_of_rounds(broken, drafting, params):
    text, start = TEXTS[2] * 2, 2
    found = small_models(broken)
    target = found.target
    drafter = FrozenDrafter(target, {}, found.heads["eagle"]) if drafting == "eagle" else FrozenDrafter(found.draft, {})
    row = {"id": "x", "input_ids": text, "loss_mask": [at >= start for at in range(len(text))], "turn": 1, "task": ""}
    how = Rollouts(target, drafter, 3, 1, params, 4, 0, CONTEXT)
    with pytest.raises(NonFinite) as caught, name_nonfinite(["row-0"]):
        how.label_response(drafter.branches(3), row, 0)
    assert caught.value.model == broken and caught.value.prompt == "row-0"
    # Where drafts begin; a head is not even given broken states.
    assert caught.value.position == (0 if (broken, drafting) == ("target", "eagle") else start + 1)


@pytest.mark.parametrize("params", [GREEDY, MODES[1]], ids=str)
def test_answers(params):
    def drawn(number: int):
        return RowUniforms("test", 0, number)

    assert all(len(answer) == 8 for answer in generate_all(small_lm(1), TEXTS, params, 8, 2, drawn))
    target = small_lm(1, ("embed_tokens.weight", (8, 0)))  # which only the second prompt holds
    with pytest.raises(NonFinite) as caught:
        generate_all(target, TEXTS, params, 1, 2, drawn)
    assert (caught.value.model, caught.value.row, caught.value.position) == ("target", 1, 4)

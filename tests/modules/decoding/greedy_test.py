"""Greedy decoding in float32 with every method, of one sequence and of several together: token by token what
autoregression and transformers' generate give, with the counts of each alone."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds import (
    CONTEXT,
    GREEDY,
    HIDDEN,
    NEW_TOKENS,
    World,
    make_world,
    near_copy,
    quick_eagle_head,
    run_models,
    tiny_llama_dir,
    transformers_answers,
)

from draftsmith.modules.decoding.loop import Generation, generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.trace import pool
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError

METHODS = [
    "spec:k=1", "spec:k=5", "specdec++:h=0.5:min=1:max=8", "confidence:t=0.2:max=8", "self-verify:k=6", "eagle:k=4",
    "cost:c=0.1:max=6", "online:c=0.02:max=6", "online:c=0.01:max=5:drafter=eagle",
    "specdec++:h=0.5:min=1:max=5:drafter=eagle", "confidence:t=0.2:max=6:drafter=eagle",
    "self-verify:k=5:drafter=eagle", "eagle-static", "eagle-tree:nodes=12:depth=3:topk=4",
    "pre-verify:k=4",
    "pre+self-verify:k=5", "hsddw:k=3:max=9",
    "pld:k=6", "lookahead:w=6:n=4:g=6", "hf-target", "hf-draft",
]  # fmt: skip
COUNT = 11


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("greedy"))


@pytest.fixture(scope="module")
def alone(world):
    """Answers of a method to the first prompts one by one, by one drafter; made once."""

    @functools.cache
    def answers(method: str) -> list[Generation]:
        drafter = world.drafter(method)
        count = 5 if method.startswith("hf") else COUNT  # the universal engine is slow, and has parity tests
        return [world.run(method, prompt, NEW_TOKENS, drafter=drafter) for prompt in world.prompts[:count]]

    return answers


@pytest.mark.parametrize("method", ["ar", *METHODS])
def test_every_prompt_gets_the_answer_of_transformers(world, alone, method):
    made = alone(method)
    for answer, one in zip(world.answers, made, strict=False):
        assert one.tokens == answer and not one.ended
    steps = {(step.num_drafted, step.num_accepted) for one in made for step in one.trace.steps}
    if method != "ar":  # else nothing was tested: drafts accepted whole (of trees: to some depth), in part, not at all
        tree = method.startswith(("eagle-static", "eagle-tree", "lookahead"))
        assert any(a == d > 0 or (tree and a > 1) for d, a in steps) and any(a == 0 < d for d, a in steps)
        assert method == "spec:k=1" or any(0 < a < d for d, a in steps)


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 9])
def test_a_full_context_ends_the_answer(world, length):
    prompt = (world.prompts[-1] * CONTEXT)[:length]
    answer = transformers_answers(world.oracle, [prompt], CONTEXT - length)[0]
    for method in ["ar", *METHODS]:
        done = world.run(method, prompt, NEW_TOKENS)
        assert done.tokens == answer, method
        assert not done.ended


@pytest.mark.parametrize("method", ["spec:k=5", "eagle:k=4", "online:c=0.02:max=6"])
def test_drafts_end_with_the_answer(world, method):
    prompts = world.prompts[:9]
    ends = tuple(dict.fromkeys(answer[4 + 3 * i] for i, answer in enumerate(world.answers[:9])))
    models = world.models(ends=ends)
    drafter, behind = parse_method(method).build(models), 0
    for prompt in prompts:
        one, full = world.run(method, prompt, NEW_TOKENS, ends, drafter=drafter), world.drafter(method)
        going_on = world.run(method, prompt, NEW_TOKENS, ends, drafter=full)
        assert going_on.tokens == one.tokens
        behind += pool([going_on.trace]).num_discarded - pool([one.trace]).num_discarded
    assert behind > 0


def test_a_draft_of_a_shorter_context_stops_drafting(world):
    prompts = [*world.prompts[:11], (world.prompts[-1] * CONTEXT)[:45]]  # its context is 40: the last never drafts
    single = ChainDrafter(DraftModelNet(world.short_draft), FixedLengthStop(5), CONTEXT)
    made, went_quiet = [world.run("spec", prompt, NEW_TOKENS, drafter=single) for prompt in prompts], 0
    for prompt, answer, one in zip(prompts, world.answers, made, strict=False):
        assert one.tokens == answer or prompt not in world.prompts
        end, steps = len(prompt) + 1, one.trace.steps
        for step in steps:
            # The last drafted token is never read: its position may be the first one past the draft's context.
            assert end + step.num_drafted - 1 <= 40 or step.num_drafted == 0
            end += step.num_emitted
        went_quiet += steps[0].num_drafted > 0 and steps[-2].num_drafted == 0
    assert went_quiet > 3
    assert made[-1].trace.num_draft_tokens == 0 < made[0].trace.num_draft_tokens
    # Behind 39 tokens it drafts two: it reads the first at its last position, and not the second.
    near = world.run("spec", (world.prompts[-1] * CONTEXT)[:38], NEW_TOKENS, drafter=single)
    assert near.trace.steps[0].num_drafted == 2


def test_what_cannot_be_decoded_is_refused(world):
    for prompt, count, field in (([], 4, "prompt"), ([5] * CONTEXT, 4, "prompt"), ([5], 0, "max_new_tokens")):
        with pytest.raises(InputError, match=field):
            generate_one(world.target, None, prompt, GREEDY, count, TorchSource(0))


def test_a_context_of_thousands_of_tokens(tmp_path):
    """Positions, masks and caches far from the beginning."""
    context, count = 4608, 32
    directory = tiny_llama_dir(tmp_path / "target", seed=3, hidden=HIDDEN, max_position_embeddings=context)
    draft = load_lm(str(near_copy(directory, tmp_path / "draft", noise=0.1)))
    target, rng = load_lm(str(directory)), random.Random(1)
    prompt = [rng.randrange(5, target.info.vocab_size) for _ in range(4000)]
    answer = generate_one(target, None, prompt, GREEDY, count, TorchSource(0), ()).tokens
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *answer]]), logits_to_keep=count + 1).logits[0, :-1]
    assert logits.argmax(-1).tolist() == answer
    eagle = quick_eagle_head(target, [[*prompt, *answer][-64 - shift : -shift] for shift in (1, 2, 3)], steps=60)
    models = run_models(target, draft, draft, eagle=eagle, capacity=context)
    for method in (
        "spec:k=4",
        "eagle:k=4",
        "eagle-tree:nodes=12:depth=3:topk=4",
        "hsddw:k=3:max=8",
        "pld",
    ):
        done = generate_one(target, parse_method(method).build(models), prompt, GREEDY, count, TorchSource(0), ())
        assert done.tokens == answer, method
        assert done.trace.num_draft_tokens > 0
        assert done.trace.num_accepted > 0 or method.startswith(("eagle", "pld"))

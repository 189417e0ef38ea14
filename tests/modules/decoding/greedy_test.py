"""Greedy decoding in float32 with every method: token by token what autoregression and transformers' generate give."""

from __future__ import annotations

import random

import pytest
import torch
from greedy_world import GREEDY, HIDDEN, NEW_TOKENS, World, make_world, near_copy, transformers_answer
from quick_heads import quick_eagle_head
from run_models import run_models
from tiny_models import CONTEXT, tiny_llama_dir
from transformers import AutoModelForCausalLM

from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource

METHODS = [
    "spec:k=1", "spec:k=5", "specdec++:h=0.5:min=1:max=8", "confidence:t=0.2:max=8", "self-verify:k=6", "eagle:k=4",
    "cost:c=0.1:max=6", "online:c=0.02:max=6", "online:c=0.01:max=5:drafter=eagle",
    "online:head=on:c=0.02:max=6",
    "specdec++:h=0.5:min=1:max=5:drafter=eagle", "confidence:t=0.2:max=6:drafter=eagle",
    "self-verify:k=5:drafter=eagle", "eagle-static", "eagle-tree:nodes=12:depth=3:topk=4",
    "pre-verify:k=4",
    "pre+self-verify:k=5", "hsddw:k=3:max=9",
    "pld:k=6", "lookahead:w=6:n=4:g=6", "pearl:k=3", "hf-target", "hf-draft",
]  # fmt: skip
OWN = [method for method in METHODS if not method.startswith("hf")]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("greedy"))


@pytest.mark.parametrize("method", ["ar", *METHODS])
def test_every_prompt_gets_the_answer_of_transformers(world, method):
    drafter, accepted = world.drafter(method), set()
    count = 5 if method.startswith("hf") else 16  # the universal engine is slow, and has parity tests
    for prompt, answer in list(zip(world.prompts, world.answers, strict=True))[:count]:
        done = world.run(method, prompt, NEW_TOKENS, drafter=drafter)
        assert done.tokens == answer
        accepted |= {(step.num_drafted, step.num_accepted) for step in done.trace.steps}
    if method != "ar":  # else nothing was tested: drafts accepted whole (of trees: to some depth), in part, not at all
        tree = method.startswith(("eagle-static", "eagle-tree", "lookahead"))
        assert any(a == d > 0 or (tree and a > 1) for d, a in accepted) and any(a == 0 < d for d, a in accepted)
        assert method in ("spec:k=1", "pearl:k=3") or any(0 < a < d for d, a in accepted)


@pytest.mark.parametrize("method", OWN)
def test_an_end_token_inside_an_accepted_draft_ends_the_answer(world, method):
    inside = 0
    for prompt, answer in list(zip(world.prompts, world.answers, strict=True))[:8]:
        for end in dict.fromkeys(answer[2:20:5]):
            done = world.run(method, prompt, NEW_TOKENS, (end,))
            assert done.tokens == answer[: answer.index(end) + 1]
            assert done.ended
            last = done.trace.steps[-1] if done.trace.steps else None
            inside += last is not None and last.num_emitted <= last.num_accepted
    # The cut fell among accepted tokens, behind which others had been accepted; lookups seldom get that far.
    assert inside > 3 or method.startswith(("pld", "lookahead"))


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 9])
def test_a_full_context_ends_the_answer(world, length):
    prompt = (world.prompts[-1] * CONTEXT)[:length]
    answer = transformers_answer(world.oracle, prompt, CONTEXT - length)
    for method in ["ar", *METHODS]:
        done = world.run(method, prompt, NEW_TOKENS)
        assert done.tokens == answer, method
        assert not done.ended


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
        "pearl:k=3",
    ):
        done = generate_one(target, parse_method(method).build(models), prompt, GREEDY, count, TorchSource(0), ())
        assert done.tokens == answer, method
        assert done.trace.num_draft_tokens > 0
        assert done.trace.num_accepted > 0 or method.startswith(("eagle", "pld"))

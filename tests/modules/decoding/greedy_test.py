"""Greedy decoding in float32 with every method: token by token what autoregression and transformers' generate give."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_heads import quick_eagle_head
from tiny_models import CONTEXT, tiny_llama_dir
from transformers import AutoModelForCausalLM

from draftsmith.data.models import load_lm
from draftsmith.eval.methods import parse_method
from draftsmith.eval.methods.base import Models
from draftsmith.modules.decoding.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.decoding.loop import generate
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.heads.acceptance import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.heads.eagle import EagleHead
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams

GREEDY, HIDDEN, NUM_PROMPTS, NEW_TOKENS = SamplingParams(), 32, 24, 60
METHODS = [
    "spec:k=1", "spec:k=5", "specdec++:h=0.5:min=1:max=8", "confidence:t=0.2:max=8", "self-verify:k=6", "eagle:k=4",
    "specdec++:h=0.5:min=1:max=5:drafter=eagle", "confidence:t=0.2:max=6:drafter=eagle",
    "self-verify:k=5:drafter=eagle", "eagle-tree", "eagle2:nodes=12:depth=3:topk=4",
    "eagle2:nodes=9:depth=2:topk=3:value=off", "eagle2:nodes=10:depth=4:topk=3:rerank=off", "pre-verify:k=4",
    "pre+self-verify:k=5", "hsddw:k=3:max=9", "pre-verify:k=3:drafter=eagle", "hsddw:k=3:max=9:drafter=eagle",
    "pld:k=6", "lookahead:w=6:n=4:g=6", "pearl:k=3", "hf-target", "hf-draft",
]  # fmt: skip
OWN = [method for method in METHODS if not method.startswith("hf")]


def near_copy(directory: Path, to: Path, noise: float, **config: Any) -> Path:
    """The target with a little noise on its weights: a draft that is often right and often wrong."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.data.add_(noise * weight.std() * torch.randn_like(weight))
    for name, value in config.items():
        setattr(model.config, name, value)
    model.save_pretrained(to)
    return to


@dataclass(frozen=True)
class World:
    """One target, what drafts for it, the prompts, and what transformers answers to each of them."""

    directory: Path
    target: Any
    hf_target: Any
    draft: Any
    hf_draft: Any
    short_draft: Any
    mid: Any
    eagle: EagleHead
    acceptance: AcceptanceHead
    prompts: list[list[int]]
    answers: list[list[int]]
    oracle: Any

    def drafter(self, method: str, capacity: int = CONTEXT) -> Any:
        if method == "ar":
            return None
        if method.startswith("hf"):
            return DraftModelDrafter(self.hf_draft if method == "hf-draft" else self.draft, FixedLength(3), capacity)
        models = Models(self.target, self.draft, self.mid, self.eagle, self.acceptance, capacity=capacity)
        return parse_method(method).build(models)

    def run(
        self, method: str, prompt: list[int], count: int, eos_ids: tuple[int, ...] = (), drafter: Any = None
    ) -> Any:
        target = self.hf_target if method == "hf-target" else self.target
        drafter = drafter or self.drafter(method)
        return generate(target, drafter, prompt, GREEDY, count, TorchSource(0), eos_ids)


def transformers_answer(oracle: Any, prompt: list[int], count: int, eos: int | None = None) -> list[int]:
    ids = torch.tensor([prompt])
    output = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def transformers_answers(oracle: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """All prompts in one batch, padded at the left: token by token `generate` is most of the time of these tests."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = oracle.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return output[:, width:].tolist()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    root = tmp_path_factory.mktemp("greedy")
    directory = tiny_llama_dir(root / "target", seed=3, hidden=HIDDEN)
    draft = near_copy(directory, root / "draft", noise=0.15)
    mid = near_copy(directory, root / "mid", noise=0.08)
    short = near_copy(directory, root / "short", noise=0.15, max_position_embeddings=40)
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    oracle.generation_config.eos_token_id = None
    target, rng = load_lm(str(directory)), random.Random(0)
    # Prompts of one token and of many.
    lengths = [1, 1, 2, 3] + [rng.randrange(2, 40) for _ in range(NUM_PROMPTS - 4)]
    prompts = [[rng.randrange(5, target.info.vocab_size) for _ in range(length)] for length in lengths]
    answers = transformers_answers(oracle, prompts, NEW_TOKENS)
    rows = [(prompt + answer)[:NEW_TOKENS] for prompt, answer in zip(prompts[:16], answers, strict=False)]
    torch.manual_seed(2)
    acceptance = AcceptanceHead(AcceptanceHeadConfig(HIDDEN, num_blocks=1))
    acceptance.blocks[0].linear.weight.data.normal_(std=0.3)
    return World(
        directory, target, load_lm(str(directory), engine="hf"), load_lm(str(draft)),
        load_lm(str(draft), engine="hf"), load_lm(str(short)), load_lm(str(mid)),
        quick_eagle_head(target, rows, steps=120), acceptance.requires_grad_(False), prompts, answers, oracle,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["ar", *METHODS])
def test_every_prompt_gets_the_answer_of_transformers(world, method):
    drafter, accepted = world.drafter(method), set()
    count = 5 if method.startswith("hf") else NUM_PROMPTS  # the universal engine is slow, and has parity tests
    for prompt, answer in list(zip(world.prompts, world.answers, strict=True))[:count]:
        done = world.run(method, prompt, NEW_TOKENS, drafter=drafter)
        assert done.tokens == answer
        accepted |= {(step.num_drafted, step.num_accepted) for step in done.trace.steps}
    if method != "ar":  # else nothing was tested: drafts accepted whole (of trees: to some depth), in part, not at all
        tree = method.startswith(("eagle-tree", "eagle2", "lookahead"))
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


def test_an_end_token_ends_the_answer_of_transformers_at_the_same_place(world):
    for prompt, answer in list(zip(world.prompts, world.answers, strict=True))[:3]:
        assert world.run("ar", prompt, NEW_TOKENS, (answer[9],)).tokens == transformers_answer(
            world.oracle, prompt, NEW_TOKENS, eos=answer[9]
        )


@pytest.mark.parametrize("method", OWN)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_limit_cuts_inside_a_round(world, method, count):
    for prompt, answer in list(zip(world.prompts, world.answers, strict=True))[:10]:
        done = world.run(method, prompt, count)
        assert done.tokens == answer[:count] and not done.ended
        assert done.trace.num_tokens == count


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 9])
def test_a_full_context_ends_the_answer(world, length):
    prompt = (world.prompts[-1] * CONTEXT)[:length]
    answer = transformers_answer(world.oracle, prompt, CONTEXT - length)
    for method in ["ar", *METHODS]:
        done = world.run(method, prompt, NEW_TOKENS)
        assert done.tokens == answer, method
        assert not done.ended


def test_a_prompt_without_room_or_without_tokens_is_refused(world):
    for prompt in ([], [5] * CONTEXT):
        with pytest.raises(InputError, match=f"prompt: found {len(prompt)} tokens, expected 1 to {CONTEXT - 1}"):
            world.run("ar", prompt, 4)
    with pytest.raises(InputError, match="max_new_tokens"):
        world.run("ar", [5], 0)


def test_a_draft_of_a_shorter_context_stops_drafting_where_it_ends(world):
    drafter, went_quiet = DraftModelDrafter(world.short_draft, FixedLength(5), CONTEXT), 0
    assert world.short_draft.info.max_position == 40
    for prompt, answer in list(zip(world.prompts, world.answers, strict=True))[:16]:
        done = world.run("spec", prompt, NEW_TOKENS, drafter=drafter)
        assert done.tokens == answer
        emitted = 1
        for step in done.trace.steps:
            # The last drafted token is never read: its position may be the first one past the draft's context.
            assert len(prompt) + emitted + step.num_drafted - 1 <= 40 or step.num_drafted == 0
            emitted += step.num_emitted
        went_quiet += done.trace.steps[0].num_drafted > 0 and done.trace.steps[-2].num_drafted == 0
    assert went_quiet > 5


def test_the_rounds_shown_add_up_to_the_answer(world):
    rounds = []
    done = generate(
        world.target, world.drafter("spec:k=5"), world.prompts[9], GREEDY, NEW_TOKENS, TorchSource(0), (), rounds.append
    )
    assert [token for r in rounds for token in r.tokens] == done.tokens
    assert [r.num_accepted for r in rounds[1:]] == [
        min(step.num_accepted, step.num_emitted) for step in done.trace.steps
    ]


def test_a_context_of_thousands_of_tokens(tmp_path):
    """Positions, masks and caches far from the beginning."""
    context, count = 4608, 32
    directory = tiny_llama_dir(tmp_path / "target", seed=3, hidden=HIDDEN, max_position_embeddings=context)
    draft = load_lm(str(near_copy(directory, tmp_path / "draft", noise=0.1)))
    target, rng = load_lm(str(directory)), random.Random(1)
    prompt = [rng.randrange(5, target.info.vocab_size) for _ in range(4000)]
    answer = generate(target, None, prompt, GREEDY, count, TorchSource(0), ()).tokens
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *answer]]), logits_to_keep=count + 1).logits[0, :-1]
    assert logits.argmax(-1).tolist() == answer
    eagle = quick_eagle_head(target, [[*prompt, *answer][-64 - shift : -shift] for shift in (1, 2, 3)], steps=60)
    models = Models(target, draft, draft, eagle, capacity=context)
    for method in ("spec:k=4", "eagle:k=4", "eagle2:nodes=12:depth=3:topk=4", "hsddw:k=3:max=8", "pld", "pearl:k=3"):
        done = generate(target, parse_method(method).build(models), prompt, GREEDY, count, TorchSource(0), ())
        assert done.tokens == answer, method
        assert done.trace.num_draft_tokens > 0
        assert done.trace.num_accepted > 0 or method.startswith(("eagle", "pld"))

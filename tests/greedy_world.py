"""A tiny target, everything that drafts for it, and what transformers answers: for tests of greedy decoding."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quick_heads import quick_eagle_head
from run_models import run_models
from tiny_models import CONTEXT, tiny_llama_dir
from transformers import AutoModelForCausalLM

from draftsmith.modules.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.eagle import EagleHead
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

GREEDY, HIDDEN, NUM_PROMPTS, NEW_TOKENS = SamplingParams(), 32, 24, 60


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
            return ChainDrafter(
                DraftModelNet(self.hf_draft if method == "hf-draft" else self.draft), [FixedLengthStop(3)], capacity
            )
        models = run_models(
            self.target, self.draft, self.mid, eagle=self.eagle, acceptance=self.acceptance, capacity=capacity
        )
        return parse_method(method).build(models)

    def run(
        self, method: str, prompt: list[int], count: int, eos_ids: tuple[int, ...] = (), drafter: Any = None
    ) -> Any:
        target = self.hf_target if method == "hf-target" else self.target
        drafter = drafter or self.drafter(method)
        return generate_one(target, drafter, prompt, GREEDY, count, TorchSource(0), eos_ids)


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


def make_world(root: Path) -> World:
    """Everything under `root`; only the EAGLE head is trained, on some of the answers."""
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

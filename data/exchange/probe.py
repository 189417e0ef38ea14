"""Real target features to try a head on: the model's own greedy answers to a few prompts, read back by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.batched import answer
from draftsmith.data.models import load_tokenizer
from draftsmith.data.template import prompt_ids
from draftsmith.modules.kv_cache import NoCache
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.hf import HFLM
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import SamplingParams

# Editing tasks, which any model can do and answers at some length: a head shows what it is worth on its target's text.
PROMPTS = (
    """Remove the type hints:

def total(prices: list[float], rate: float = 0.2) -> float:
    subtotal = sum(prices)
    if rate < 0:
        raise ValueError("the rate must not be negative")
    return subtotal * (1 + rate)""",
    """Rename items to records:

def first_match(items, wanted):
    for number, item in enumerate(items):
        if item.name == wanted:
            return number
    return len(items)""",
    """Add the docstring: Close the file and forget its path.

def close(self):
    if self._file is not None:
        self._file.close()
    self._file = None
    self.path = None""",
)
MAX_NEW_TOKENS = 80


@dataclass(frozen=True)
class Probe:
    """One prompt with the model's answer, and its hidden states [T, H] in float32.

    ids: [T]. start: where the answer begins. features: after the final norm. before_norm: the same before it; None
    where the model does not show them.
    """

    ids: Tensor
    start: int
    features: Tensor
    before_norm: Tensor | None


@torch.inference_mode()
def make_probes(path: str, lm: CausalLM, longest: int) -> list[Probe]:
    """path: of the model, for its tokenizer. longest: most tokens of a probe, so that a head has positions for it."""
    longest = min(longest, lm.info.max_position)
    room = min(MAX_NEW_TOKENS, longest // 2)
    prompts = [ids[: longest - room] for ids in encoded(load_tokenizer(path), PROMPTS)]
    answers = answer(lm, prompts, SamplingParams(), room, None)
    probes = []
    for prompt, reply in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *reply])
        features = lm.features(ids[None].to(lm.device))[0].float().cpu()
        probes.append(Probe(ids, len(prompt), features, before_final_norm(lm, ids)))
    return probes


def encoded(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """By the chat template where there is one: that is the text the model is served on."""
    if tokenizer.chat_template:
        return [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in prompts]
    return [list(tokenizer(text)["input_ids"]) for text in prompts]


def before_final_norm(lm: CausalLM, ids: Tensor) -> Tensor | None:
    """Hidden states [T, H] that the final norm reads: what a head must NOT be fed."""
    batch = ids[None].to(lm.device)
    if isinstance(lm, LlamaLM):
        return lm.stack.chain(lm.embed(batch), NoCache())[0].float().cpu()
    norm = getattr(lm.model.base_model, "norm", None) if isinstance(lm, HFLM) else None
    if norm is None:
        return None
    seen: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        lm.features(batch)
    finally:
        hook.remove()
    return seen[-1][0].float().cpu()

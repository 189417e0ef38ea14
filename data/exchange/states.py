"""Real target features to try a head on: the model's own greedy answers to a few prompts, read back by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from draftsmith.data.answering.batched import answer
from draftsmith.data.models.loading import load_tokenizer
from draftsmith.data.text.template import RowError, prompt_ids
from draftsmith.modules.acceptance.head import Feature, feature_value
from draftsmith.modules.decoding.confidence import Confidences, confidences_of
from draftsmith.modules.kv_cache import NoCache
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.hf import HFLM
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams

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
# The first token of a text that an EAGLE head has a state before: it reads tokens in pairs.
FIRST_JUDGED = 2
DEPTHS = 8


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


@dataclass(frozen=True)
class Judged:
    """N tokens of probes with all that an acceptance head may read of them, in float32.

    before, after, embeds: [N, H]. known: of the draft's law at temperature 1; places in the draft are counted from 1 to
    DEPTHS and again, as no draft was made.
    """

    before: Tensor
    after: Tensor
    embeds: Tensor
    known: Confidences

    def by_name(self) -> dict[str, Tensor]:
        """Name -> [N, size], by the names of `interop.acceptance.inputs_of`."""
        numbers = {name: feature_value(name, self.known)[:, None] for name in get_args(Feature)}
        return {"state_before": self.before, "state_after": self.after, "embedding": self.embeds, **numbers}


def judged_tokens(probes: Sequence[Probe], lm: CausalLM, eagle: Any | None = None) -> Judged:
    """The answers' tokens as the draft model `lm` reads them, or an EAGLE head that drafts for it."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for probe in probes:
        ids = probe.ids.to(lm.device)
        embeds = lm.embed(ids)
        states = probe.features.to(embeds)
        if eagle is not None:  # row t has read x_{t+1}; nothing has read x_0 alone
            states = torch.cat([states[:1], eagle(embeds[None, 1:], states[None, :-1])[0]])
        first = max(probe.start, FIRST_JUDGED)
        parts.append((states[first - 1 : -1], states[first:], embeds[first:]))
    before, after, embeds = (torch.cat(part) for part in zip(*parts, strict=True))
    ids = torch.cat([probe.ids[max(probe.start, FIRST_JUDGED) :] for probe in probes]).to(lm.device)
    depth = torch.arange(len(ids), device=lm.device) % DEPTHS + 1
    laws = lm.lm_head(before).float().softmax(-1)
    known = confidences_of(laws, ids, depth, torch.ones_like(depth))
    # What the texts repeat does not matter: any numbers will do that a head may meet.
    known = dataclasses.replace(known, repeat=(ids % 5 - 2).float())
    known = Confidences(*(getattr(known, field.name).cpu() for field in dataclasses.fields(known)))
    before, after, embeds = (states.float().cpu() for states in (before, after, embeds))
    return Judged(before, after, embeds, known)


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
        try:
            return [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in prompts]
        except RowError as error:
            found = f"an error on a plain question ({error})"
            raise InputError("chat_template", found, "a working template", "Save one that works.") from error
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

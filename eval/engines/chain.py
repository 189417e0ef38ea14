"""Our own chain on the same prompts, and what it would do with a head that an engine takes for another."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.settings import MODEL
from draftsmith.eval.engines.counts import Answer, Counts
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.eagle3.net import default_layers
from draftsmith.modules.drafters.methods import Models, parse_method
from draftsmith.modules.formats.rope import BASE, KNOWN, Rope, frequencies, transformers_rope
from draftsmith.modules.layers import RopeScaling
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

BIASES = {"fc": r"fc\.bias", "q, k and v": r".*\.[qkv]_proj\.bias", "o": r".*\.o_proj\.bias"}
SWITCHES = {
    "norm_output": "its own states read {} the norm",
    "norm_before_residual": "the residual taken {} the norm",
}


@dataclass(frozen=True)
class OurChain:
    """Greedy chains of `length` tokens for a target."""

    target: CausalLM
    length: int
    max_new_tokens: int

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens of the longest sequence: the last draft is as long as the others."""
        return len(prompt) + self.max_new_tokens + self.length + 1

    def answer(self, prompt: Sequence[int], kind: str, drafter: Any) -> Answer:
        """kind: of the head `drafter`, or `draft` for a model."""
        given: dict[str, Any] = {"draft": drafter} if kind == MODEL else {"heads": {kind: drafter}}
        method = parse_method(f"{'spec' if kind == MODEL else kind}:k={self.length}")
        # A chain that was started within the answer is counted whole, beyond its limit too, and also behind an end
        # token: `Models.ends` is empty.
        chain = method.build(Models(self.target, capacity=self.room(prompt) + self.length + 1, **given))
        most = self.max_new_tokens + self.length + 1
        made = generate_one(self.target, chain, prompt, SamplingParams(), most, TorchSource(0))
        accepted, emitted = [], made.trace.prefill_emitted
        for step in made.trace.steps:
            if emitted < self.max_new_tokens:
                accepted.append(step.num_accepted)
            emitted += step.num_emitted
        return Answer(tuple(made.tokens[: self.max_new_tokens]), Counts.of(accepted, self.length))


@torch.inference_mode()
def margin(target: CausalLM, before: Sequence[int], ours: int, theirs: int) -> float:
    """How much larger the target's logit of one token is than that of another, behind this text."""
    features = target.features(torch.tensor([list(before)], device=target.device))[0, -1:]
    logits = target.lm_head(features)[0].float()
    return float(logits[ours] - logits[theirs])


def misread(
    config: Any, state: Mapping[str, Tensor], target: Mapping[str, Any], num_layers: int
) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
    """What an engine may take a head for: a name for it, and its config and tensors then.

    config, state: of an EAGLE head. target: `config.json` of its target. num_layers: the target's.
    """
    kept = dict(state)
    for name, pattern in BIASES.items():
        biases = {key: torch.zeros_like(state[key]) for key in state if re.fullmatch(pattern, key)}
        if any(bool(state[key].any()) for key in biases):
            yield f"no bias of {name}", config, kept | biases
    yield from ((name, dataclasses.replace(config, llama=llama), kept) for name, llama in other_ropes(config, target))
    if not hasattr(config, "capture"):
        swapped = torch.cat(state["fc.weight"].chunk(2, dim=1)[::-1], dim=1)
        yield "the feature before the embedding in fc", config, kept | {"fc.weight": swapped}
        return
    for layers in other_layers(config.capture, num_layers):
        yield f"layers {listed(layers)} in place of {listed(config.capture)}", changed(config, capture=layers), kept
    if config.reduced:
        plain = torch.arange(config.draft_vocab_size)
        yield "drafted ids as the target's own (no d2t)", config, kept | {"d2t": plain}
    for switch, words in SWITCHES.items():
        on = getattr(config, switch)
        yield words.format("before" if on else "behind"), changed(config, **{switch: not on}), kept
    if config.fc_norm:
        bare = {name: tensor for name, tensor in kept.items() if not name.startswith("fc_norm.")}
        yield "the target's states without their norms", changed(config, fc_norm=False), bare


def changed(config: Any, **fields: Any) -> Any:
    return dataclasses.replace(config, **fields)


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def other_ropes(config: Any, target: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Rotary settings that are often taken for a head's, where they are not its own."""
    llama = config.llama
    seen = [frequencies(llama, Rope.of(llama))]
    for whose, rope in {"the target's": transformers_rope(target), "the default": Rope(BASE, RopeScaling())}.items():
        turns = frequencies(llama, rope)
        if rope.kind in KNOWN and not any(torch.equal(turns, known) for known in seen):
            seen.append(turns)
            other = dataclasses.replace(llama, rope_theta=rope.theta, rope_scaling=rope.scaling)
            yield f"rope of {rope} ({whose}) in place of {Rope.of(llama)}", other


def other_layers(capture: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """One later, one earlier (the systems count from 0 or from 1), and those that are read where none are named."""
    near = [tuple(number + step for number in capture) for step in (1, -1)]
    found = [*near, default_layers(num_layers)]
    fits = (own for own in found if len(own) == len(capture) and list(own) == sorted(set(own)) and own != capture)
    return list(dict.fromkeys(own for own in fits if own[0] >= 0 and own[-1] < num_layers))

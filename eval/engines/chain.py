"""Our own chain on prompts that an engine answers, and the ways an engine may misread a head."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.settings import MODEL
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.block.net import BlockConfig
from draftsmith.modules.drafters.eagle3.net import Eagle3Config, default_layers
from draftsmith.modules.drafters.methods import Models, parse_method
from draftsmith.modules.formats.block import other_readings
from draftsmith.modules.formats.gguf import to_halves
from draftsmith.modules.formats.rope import frequencies
from draftsmith.modules.layers import BASE, ROPE_KINDS, RopeScaling, RotarySettings, rope_settings
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams

BIASES = {"fc": r"fc\.bias", "q, k and v": r".*\.[qkv]_proj\.bias", "o": r".*\.o_proj\.bias"}
SWITCHES = {
    "norm_output": "its own states read {} the norm",
    "norm_before_residual": "the residual taken {} the norm",
}


# Counts of chains of K tokens: rounds with a draft, then for each place the drafts accepted at least up to it.
Counts = tuple[int, ...]  # [1 + K]


def tokens_per_round(counts: Counts) -> float:
    """Return accepted tokens per round plus the target's own."""
    return 1 + sum(counts[1:]) / max(counts[0], 1)


@dataclass(frozen=True)
class EngineAnswer:
    """A greedy answer and the counts of its rounds.

    generation_s: from its first token to its last; 0 if unknown. drafted: tokens of all drafts; None if unknown.
    by_place: false if only sums are known: `counts` is then (0, accepted tokens).
    """

    tokens: tuple[int, ...]
    counts: Counts
    generation_s: float = 0.0
    drafted: int | None = None
    by_place: bool = True

    @property
    def accepted(self) -> int:
        return sum(self.counts[1:])


@dataclass(frozen=True)
class OurChain:
    """Greedy chains of `length` tokens for a target.

    whole: the last draft of an answer is as long as the others and counts whole, also beyond an end token or the length
    limit, as in vLLM. Otherwise it ends before the limit, as here and in llama.cpp.
    p_min: confidence of a DSpark head below which a draft ends, as llama.cpp's --spec-draft-p-min.
    """

    target: CausalLM
    length: int
    max_new_tokens: int
    whole: bool = True
    p_min: float = 0.0

    def room(self, prompt: Sequence[int]) -> int:
        """Return the length of the longest sequence: the last draft is as long as the others."""
        return len(prompt) + self.max_new_tokens + self.length + 1

    def answer(self, prompt: Sequence[int], kind: str, drafter: Any) -> EngineAnswer:
        """Decode a prompt; kind: of the head `drafter`, or `draft` for a model."""
        loaded: dict[str, Any] = {"draft": drafter} if kind == MODEL else {"heads": {kind: drafter}}
        # A block misread may be a token shorter.
        length = min(self.length, getattr(drafter.config, "drafts", self.length))
        name = "spec" if kind == MODEL else kind
        confident = f"dspark-confidence:k={length}:t={self.p_min}"
        method = parse_method(confident if self.p_min else f"{name}:k={length}")
        # `Models.ends` stays empty: engines draft beyond an end token.
        chain = method.build(Models(self.target, capacity=self.room(prompt) + self.length + 1, **loaded))
        # Further than asked, so that the last draft is whole.
        limit = self.max_new_tokens + (self.length + 1 if self.whole else 0)
        answer = generate_one(self.target, chain, prompt, SamplingParams(), limit, TorchSource(0))
        accepted, drafted, emitted = [], 0, answer.trace.prefill_emitted
        for step in answer.trace.steps:
            # A round without a draft, before the limit, is none that an engine counts.
            if emitted < self.max_new_tokens and step.num_drafted:
                count = step.num_accepted
                if not self.whole and step.num_emitted < step.num_drafted:
                    count = min(count, step.num_emitted - 1)  # llama.cpp counts no end token inside of a draft
                accepted.append(count)
                drafted += step.num_drafted
            emitted += step.num_emitted
        counts = (len(accepted), *(sum(count > place for count in accepted) for place in range(self.length)))
        return EngineAnswer(tuple(answer.tokens[: self.max_new_tokens]), counts, drafted=drafted)


def misreadings(
    config: Any, state: Mapping[str, Tensor], target: Mapping[str, Any], num_layers: int
) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
    """Yield the ways an engine may misread a head: a name, and the config and tensors it would then use.

    Args:
        config, state: of a head.
        target: `config.json` of its target.
        num_layers: number of the target's layers.
    """
    tensors = dict(state)
    for name, pattern in BIASES.items():
        zeros = {key: torch.zeros_like(state[key]) for key in state if re.fullmatch(pattern, key)}
        if any(bool(state[key].any()) for key in zeros):
            yield f"no bias of {name}", config, tensors | zeros

    # Rotary settings that are often taken for a head's: the target's, and transformers' defaults.
    llama = config.llama
    tried = [frequencies(llama)]
    for whose, rope in {
        "the target's": rope_settings(target),
        "the default": RotarySettings(BASE, RopeScaling()),
    }.items():
        turns = frequencies(llama, rope)
        if rope.kind in ROPE_KINDS and not any(torch.equal(turns, other) for other in tried):
            tried.append(turns)
            other = dataclasses.replace(llama, rope_theta=rope.theta, rope_scaling=rope.scaling)
            name = f"rope of {rope} ({whose}) in place of {RotarySettings.of(llama)}"
            yield name, dataclasses.replace(config, llama=other), tensors

    if isinstance(config, BlockConfig):
        yield from block_misreadings(config, tensors, num_layers)
        return
    if not hasattr(config, "capture"):  # EAGLE-1
        swapped = torch.cat(state["fc.weight"].chunk(2, dim=1)[::-1], dim=1)
        yield "the feature before the embedding in fc", config, tensors | {"fc.weight": swapped}
        return
    yield from eagle3_misreadings(config, tensors, num_layers)


def eagle3_misreadings(
    config: Eagle3Config, tensors: dict[str, Tensor], num_layers: int
) -> Iterator[tuple[str, Eagle3Config, dict[str, Tensor]]]:
    """Yield the ways an engine may misread an EAGLE-3 head, as `misreadings`."""
    # The layers one later and one earlier (systems count from 0 or from 1), and the default ones.
    shifted = [tuple(number + step for number in config.capture) for step in (1, -1)]
    for layers in dict.fromkeys([*shifted, default_layers(num_layers)]):
        fits = len(layers) == len(config.capture) and layers[0] >= 0 and layers[-1] < num_layers
        if fits and layers != config.capture:
            name = f"layers {', '.join(map(str, layers))} in place of {', '.join(map(str, config.capture))}"
            yield name, dataclasses.replace(config, capture=layers), tensors
    if config.reduced:
        d2t = torch.arange(config.draft_vocab_size)
        yield "drafted ids as the target's own (no d2t)", config, tensors | {"d2t": d2t}
    for switch, words in SWITCHES.items():
        on = getattr(config, switch)
        switched: dict[str, Any] = {switch: not on}
        yield words.format("before" if on else "behind"), dataclasses.replace(config, **switched), tensors
    if config.norm_before_fc:
        bare = {name: tensor for name, tensor in tensors.items() if name != "input_norm.weight"}
        yield "the target's states without their norm", dataclasses.replace(config, norm_before_fc=False), bare
    if config.fc_norm:
        bare = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc_norm.")}
        yield "the target's states without their norms", dataclasses.replace(config, fc_norm=False), bare


def block_misreadings(
    config: BlockConfig, state: dict[str, Tensor], num_layers: int
) -> Iterator[tuple[str, BlockConfig, dict[str, Tensor]]]:
    """Yield the ways an engine may misread a block drafter, as `misreadings`."""
    for name, other in other_readings(config, num_layers):
        yield name, other, state
        if other.drafts < config.drafts:  # vLLM lays as many slots as it takes
            yield f"{name}, a slot longer", dataclasses.replace(other, block_size=config.block_size + 1), state
    if config.mask_token:
        yield "the mask token 0", dataclasses.replace(config, mask_token=0), state
    if config.markov_rank:
        bare = {
            name: tensor for name, tensor in state.items() if "markov_head" not in name and "confidence" not in name
        }
        yield "no Markov head", dataclasses.replace(config, markov_rank=0, confidence=False), bare
    causal = dataclasses.replace(config.llama, sliding_window=config.max_position + config.block_size)
    if config.llama.sliding_window is None:
        yield "slots that see no later ones", dataclasses.replace(config, llama=causal), state
    halves = {}
    for name, tensor in state.items():
        part = name.split(".")[-2]
        heads = {"q_proj": config.llama.num_heads, "k_proj": config.llama.num_kv_heads, "q_norm": 1, "k_norm": 1}
        halves[name] = to_halves(tensor, heads[part]) if part in heads else tensor
    yield "rotary neighbours in place of halves", config, halves

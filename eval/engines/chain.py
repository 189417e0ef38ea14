"""Our own chain on prompts that an engine answers, and the ways an engine may misread a head."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.settings import MODEL
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.drafters.eagle3.net import default_layers
from draftsmith.modules.drafters.methods import Models, parse_method
from draftsmith.modules.formats.rope import BASE, KNOWN, RotarySettings, frequencies, transformers_rope
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
class DraftCounts:
    """Numbers that vLLM counts of chains of one length.

    Accepted tokens beyond an end token or the length limit count too, as in vLLM.

    Attributes:
        drafts: rounds with a draft.
        by_place: [K], drafts whose tokens were accepted at least up to that place.
    """

    drafts: int
    by_place: tuple[int, ...]

    @staticmethod
    def of(accepted: Iterable[int], length: int) -> DraftCounts:
        """Count rounds, given the number of accepted tokens of each."""
        rounds = list(accepted)
        return DraftCounts(len(rounds), tuple(sum(count > place for count in rounds) for place in range(length)))

    def __add__(self, other: DraftCounts) -> DraftCounts:
        by_place = tuple(a + b for a, b in zip(self.by_place, other.by_place, strict=True))
        return DraftCounts(self.drafts + other.drafts, by_place)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        by_place = tuple(a - b for a, b in zip(self.by_place, other.by_place, strict=True))
        return DraftCounts(self.drafts - other.drafts, by_place)

    @property
    def accepted(self) -> int:
        return sum(self.by_place)

    @property
    def tokens_per_round(self) -> float:
        """Accepted tokens per round plus the target's own."""
        return 1 + self.accepted / max(self.drafts, 1)

    @property
    def rates(self) -> tuple[float, ...]:
        """[K]: share of the drafts accepted up to each place."""
        return tuple(count / max(self.drafts, 1) for count in self.by_place)


@dataclass(frozen=True)
class EngineAnswer:
    """A greedy answer and the counts of its rounds."""

    tokens: tuple[int, ...]
    counts: DraftCounts


@dataclass(frozen=True)
class OurChain:
    """Greedy chains of `length` tokens for a target."""

    target: CausalLM
    length: int
    max_new_tokens: int

    def room(self, prompt: Sequence[int]) -> int:
        """Return the length of the longest sequence: the last draft is as long as the others."""
        return len(prompt) + self.max_new_tokens + self.length + 1

    def answer(self, prompt: Sequence[int], kind: str, drafter: Any) -> EngineAnswer:
        """Decode a prompt; kind: of the head `drafter`, or `draft` for a model."""
        loaded: dict[str, Any] = {"draft": drafter} if kind == MODEL else {"heads": {kind: drafter}}
        method = parse_method(f"{'spec' if kind == MODEL else kind}:k={self.length}")
        # vLLM counts a chain that begins within the answer whole, beyond the length limit and an end token. So we
        # decode further than asked, and `Models.ends` stays empty.
        chain = method.build(Models(self.target, capacity=self.room(prompt) + self.length + 1, **loaded))
        limit = self.max_new_tokens + self.length + 1
        answer = generate_one(self.target, chain, prompt, SamplingParams(), limit, TorchSource(0))
        accepted, emitted = [], answer.trace.prefill_emitted
        for step in answer.trace.steps:
            if emitted < self.max_new_tokens:
                accepted.append(step.num_accepted)
            emitted += step.num_emitted
        return EngineAnswer(tuple(answer.tokens[: self.max_new_tokens]), DraftCounts.of(accepted, self.length))


@torch.inference_mode()
def logit_margin(target: CausalLM, before: Sequence[int], ours: int, theirs: int) -> float:
    """Return the target's logit of one token minus that of another, after this text."""
    features = target.features(torch.tensor([list(before)], device=target.device))[0, -1:]
    logits = target.lm_head(features)[0].float()
    return float(logits[ours] - logits[theirs])


def misreadings(
    config: Any, state: Mapping[str, Tensor], target: Mapping[str, Any], num_layers: int
) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
    """Yield the ways an engine may misread a head: a name, and the config and tensors it would then use.

    Args:
        config, state: of an EAGLE or EAGLE-3 head.
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
        "the target's": transformers_rope(target),
        "the default": RotarySettings(BASE, RopeScaling()),
    }.items():
        turns = frequencies(llama, rope)
        if rope.kind in KNOWN and not any(torch.equal(turns, other) for other in tried):
            tried.append(turns)
            other = dataclasses.replace(llama, rope_theta=rope.theta, rope_scaling=rope.scaling)
            name = f"rope of {rope} ({whose}) in place of {RotarySettings.of(llama)}"
            yield name, dataclasses.replace(config, llama=other), tensors

    if not hasattr(config, "capture"):  # EAGLE-1
        swapped = torch.cat(state["fc.weight"].chunk(2, dim=1)[::-1], dim=1)
        yield "the feature before the embedding in fc", config, tensors | {"fc.weight": swapped}
        return
    for layers in other_layers(config.capture, num_layers):
        name = f"layers {', '.join(map(str, layers))} in place of {', '.join(map(str, config.capture))}"
        yield name, dataclasses.replace(config, capture=layers), tensors
    if config.reduced:
        d2t = torch.arange(config.draft_vocab_size)
        yield "drafted ids as the target's own (no d2t)", config, tensors | {"d2t": d2t}
    for switch, words in SWITCHES.items():
        on = getattr(config, switch)
        yield words.format("before" if on else "behind"), dataclasses.replace(config, **{switch: not on}), tensors
    if config.fc_norm:
        bare = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc_norm.")}
        yield "the target's states without their norms", dataclasses.replace(config, fc_norm=False), bare


def other_layers(capture: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """Return the layers one later and one earlier (systems count from 0 or from 1), and the default ones."""
    shifted = [tuple(number + step for number in capture) for step in (1, -1)]
    valid = [
        layers
        for layers in (*shifted, default_layers(num_layers))
        if len(layers) == len(capture) and list(layers) == sorted(set(layers)) and layers != capture
    ]
    return list(dict.fromkeys(layers for layers in valid if layers[0] >= 0 and layers[-1] < num_layers))

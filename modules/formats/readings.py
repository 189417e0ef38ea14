"""Ways to read a head that its tensors fit as well as its own: other settings, or weights in another order.

`check`, `diagnose` and `repair` try which of them drafts better than the head as its files say, and `check --engine`
with which of them our chain counts what an engine does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.modules.drafters.block.net import BlockConfig, Layout
from draftsmith.modules.drafters.eagle3 import Eagle3Config, default_layers
from draftsmith.modules.formats.llama import frequencies, to_adjacent, to_halves
from draftsmith.modules.llama_config import (
    BASE,
    ROPE_KINDS,
    CaptureConfig,
    LlamaHeadConfig,
    RopeScaling,
    RotarySettings,
)
from draftsmith.modules.targets.base import final_state

BIASES = {"fc": r"fc\.bias", "q, k and v": r".*\.[qkv]_proj\.bias", "o": r".*\.o_proj\.bias"}
USUAL_WINDOW = 2048  # speculators' default
ROTATED = re.compile(r".*\.[qk]_proj\.(weight|bias)")
NORMS = re.compile(r".*\.[qk]_norm\.weight")
TRAINER = "trainer"  # factor of readings that no file and no server has: the head as its trainer computed it
MODELOPT, SPECFORGE = "ModelOpt 0.47", "SpecForge 0.2"


@dataclass(frozen=True)
class Reading:
    """A head, read in another way.

    factor, label: what is read otherwise, and how. config, state: the head then, its tensors by our names.
    """

    factor: str
    label: str
    config: LlamaHeadConfig
    state: Mapping[str, Tensor]


def readings(
    config: object,
    state: Mapping[str, Tensor],
    num_layers: int,
    target_rope: RotarySettings | None = None,
    masks: Sequence[int] = (),
) -> Iterator[Reading]:
    """Yield the readings of a head that a head's files can mean, one change each.

    num_layers, target_rope: of the target. masks: tokens that may fill a block drafter's slots.
    """
    if not isinstance(config, LlamaHeadConfig):
        return
    if isinstance(config, CaptureConfig):
        yield from other_layers(config, state, num_layers)
    yield from other_rotary(config, state, target_rope)
    yield from other_weights(config, state)
    yield from other_windows(config, state)
    if isinstance(config, BlockConfig):
        if config.block_size > 1:
            other: Layout = "fill-in" if config.layout == "anchor-first" else "anchor-first"
            label = f"layout {other} in place of {config.layout}"
            yield Reading("layout", label, dataclasses.replace(config, layout=other), state)
        for causal, label in ((True, "slots that see no later ones"), (False, "slots that see later ones")):
            if causal != config.causal:
                yield Reading("causality", label, dataclasses.replace(config, causal=causal), state)
        for token in masks:
            if token != config.mask_token:
                changed = dataclasses.replace(config, mask_token=token)
                yield Reading("mask token", f"mask token {token}", changed, state)
    if isinstance(config, Eagle3Config):
        # Switches that no tensor shows.
        normed = dataclasses.replace(config, norm_output=not config.norm_output)
        label = "norm_output on" if normed.norm_output else f"norm_output off (as {SPECFORGE} and verl-SpeCo 0.1 train)"
        yield Reading("switches", label, normed, state)
        before = dataclasses.replace(config, norm_before_residual=not config.norm_before_residual)
        label = f"norm_before_residual {'on' if before.norm_before_residual else 'off'}"
        yield Reading("switches", label, before, state)
        yield from other_norms(config, state)


def other_norms(config: Eagle3Config, state: Mapping[str, Tensor]) -> Iterator[Reading]:
    """Yield readings by the norms that trainers compute and no server does, as weights that servers read."""
    name = "layer.hidden_norm.weight"
    first, second, last = state["layer.input_layernorm.weight"].float(), state[name].float(), state["norm.weight"]
    # A normed state times w, normed again, is itself times w / rms(w), but for a factor near 1 that differs by token.
    # Source: modelopt/torch/speculative/plugins/modeling_eagle.py, whose layer is transformers' with a hook.
    twice = second * first / first.square().mean().sqrt()
    if not torch.allclose(twice, second, rtol=1e-3):
        label = f"the state normed twice (as {MODELOPT} trains)"
        yield Reading(TRAINER, label, config, {**state, name: twice.to(state[name].dtype)})
    # A factor of a token's logits changes no first choice. Source: specforge/modeling/draft/llama3_eagle.py.
    if not config.norm_output and bool((last != last[0]).any()):
        label = f"no norm before lm_head (as {SPECFORGE} trains where norm_output is false)"
        yield Reading(TRAINER, label, config, {**state, "norm.weight": torch.ones_like(last)})


def other_layers(config: CaptureConfig, state: Mapping[str, Tensor], num_layers: int) -> Iterator[Reading]:
    """Yield readings by other layers of the target: one earlier or later, the default ones, and in opposite order; for
    the state after the last layer that after the final norm, the last one of transformers' hidden_states."""
    own = config.aux_layers
    usual = default_layers(num_layers) if isinstance(config, Eagle3Config) else ()
    for layers in dict.fromkeys([*(tuple(number + step for number in own) for step in (-1, 1)), usual]):
        if own and len(layers) == len(own) and layers != own and layers[0] >= 0 and layers[-1] <= num_layers:
            label = in_place(layers, own, " (the default)" if layers == usual else "")
            yield Reading("layers", label, dataclasses.replace(config, aux_layers=layers), state)
    if own and own[-1] == num_layers:
        normed = dataclasses.replace(config, aux_layers=(*own[:-1], final_state(num_layers)))
        yield Reading("layers", f"the final norm's state in place of layer {num_layers}", normed, state)
    if len(own) > 1:
        turned = {name: reversed_states(name, tensor, len(own)) for name, tensor in state.items()}
        for number in range(len(own) if "fc_norm.0.weight" in state else 0):  # EAGLE-3.1 has one for each layer
            turned[f"fc_norm.{number}.weight"] = state[f"fc_norm.{len(own) - 1 - number}.weight"]
        yield Reading("layers", in_place(own[::-1], own), config, turned)


def in_place(layers: Sequence[int], own: Sequence[int], which: str = "") -> str:
    return f"layers {', '.join(map(str, layers))}{which} in place of {', '.join(map(str, own))}"


def reversed_states(name: str, tensor: Tensor, count: int) -> Tensor:
    """Return a tensor with the parts that read the target's `count` states in the opposite order."""
    dim = {"fc.weight": 1, "input_norm.weight": 0}.get(name)
    return tensor if dim is None else torch.cat(tensor.chunk(count, dim)[::-1], dim)


def other_rotary(
    config: LlamaHeadConfig, state: Mapping[str, Tensor], target_rope: RotarySettings | None
) -> Iterator[Reading]:
    """Yield readings by rotary settings that are often taken for a head's: the target's, and transformers' defaults."""
    llama = config.llama
    tried = [frequencies(llama)]
    others = {"the target's": target_rope, "the default": RotarySettings(BASE, RopeScaling())}
    if isinstance(config, BlockConfig):
        # Under transformers 5 it takes the target's base from a field that is not there, and exports the target's.
        others[f"the default, as {MODELOPT} trains"] = others.pop("the default")
    if llama.rope_scaling.kind == "yarn":
        plain = RopeScaling(partial_rotary_factor=llama.rope_scaling.partial_rotary_factor)
        others = {f"without YaRN, which {MODELOPT} adds at export": RotarySettings(llama.rope_theta, plain), **others}
    for whose, rope in others.items():
        if rope is None or rope.kind not in ROPE_KINDS:
            continue
        turns = frequencies(llama, rope)
        if not any(torch.equal(turns, other) for other in tried):
            tried.append(turns)
            other = dataclasses.replace(llama, rope_theta=rope.theta, rope_scaling=rope.scaling)
            label = f"rope of {rope} ({whose}) in place of {RotarySettings.of(llama)}"
            yield Reading("rotary", label, dataclasses.replace(config, llama=other), state)


def other_windows(config: LlamaHeadConfig, state: Mapping[str, Tensor]) -> Iterator[Reading]:
    """Yield readings without the window, and of a head without one with that of speculators."""
    own = config.llama.sliding_window
    if own is None and config.windowed and config.max_position > USUAL_WINDOW:
        yield Reading("window", f"a window of {USUAL_WINDOW} tokens", config.with_window(USUAL_WINDOW), state)
    if own is not None:
        yield Reading("window", f"no window in place of {own} tokens", config.with_window(None), state)


def other_weights(config: LlamaHeadConfig, state: Mapping[str, Tensor]) -> Iterator[Reading]:
    """Yield readings of the weights as another convention stores them."""
    # Weights that read an embedding and a state side by side.
    names = [f"layer.self_attn.{part}_proj.weight" for part in "qkv"] if isinstance(config, Eagle3Config) else []
    names = names or ["fc.weight"] * ("fc.weight" in state and not isinstance(config, BlockConfig))
    if names:
        order = "feature before the embedding in fc" if len(names) == 1 else "state before the embedding in q, k and v"
        exchanged = {name: torch.cat(state[name].chunk(2, 1)[::-1], 1) for name in names}
        yield Reading("weights", f"the {order}", config, {**state, **exchanged})
    # Llama's own code rotates neighbors (0, 1), transformers halves (0, d/2): converters permute q and k.
    rotated = [name for name in state if ROTATED.fullmatch(name)]
    llama = config.llama
    for how, reorder in (("not converted", to_halves), ("converted twice", to_adjacent)):
        other = {name: reorder(state[name], len(state[name]) // llama.head_dim, llama.rotary_dim) for name in rotated}
        if rotated:
            label = f"q and k as if {how} from interleaved pairs"
            yield Reading("weights", label, config, {**state, **other})


def engine_readings(
    config: LlamaHeadConfig, state: Mapping[str, Tensor], target_window: int | None = None
) -> Iterator[Reading]:
    """Yield readings that an engine may have and no file means: parts of the head that it leaves out, and the like.

    target_window: the sliding window of a target whose layers all have one, which vLLM gives heads without one.
    """
    if (own := config.llama.sliding_window) is not None:
        for window in (own - 1, own + 1):  # as a server counts that leaves the token out, or counts it twice
            label = f"a window of {window} tokens in place of {own}"
            yield Reading("window", label, config.with_window(max(1, window)), state)
    elif target_window and config.windowed:
        label = f"the target's window of {target_window} tokens"
        yield Reading("window", label, config.with_window(target_window), state)
    for name, pattern in BIASES.items():
        zeros = {key: torch.zeros_like(state[key]) for key in state if re.fullmatch(pattern, key)}
        if any(bool(state[key].any()) for key in zeros):
            yield Reading("biases", f"no bias of {name}", config, {**state, **zeros})
    if "d2t" in state:
        d2t = torch.arange(len(state["d2t"]))
        yield Reading("vocabulary", "drafted ids as the target's own (no d2t)", config, {**state, "d2t": d2t})
    if isinstance(config, Eagle3Config) and (config.norm_before_fc or config.fc_norm):
        bare = {name: tensor for name, tensor in state.items() if not name.startswith(("input_norm.", "fc_norm."))}
        plain = dataclasses.replace(config, norm_before_fc=False, fc_norm=False)
        label = f"the target's states without their norm{'s' if config.fc_norm else ''}"
        yield Reading("norms", label, plain, bare)
    if isinstance(config, BlockConfig):
        if config.layout == "anchor-first":  # vLLM lays as many slots as it takes
            longer = dataclasses.replace(config, layout="fill-in", block_size=config.block_size + 1)
            yield Reading("layout", "layout fill-in in place of anchor-first, a slot longer", longer, state)
        if config.markov_rank:
            bare = {name: tensor for name, tensor in state.items() if not name.startswith(("markov_", "confidence_"))}
            yield Reading(
                "Markov head", "no Markov head", dataclasses.replace(config, markov_rank=0, confidence=False), bare
            )
        rotated = {
            name: len(tensor) // config.llama.head_dim for name, tensor in state.items() if ROTATED.fullmatch(name)
        }
        rotated |= {name: 1 for name in state if NORMS.fullmatch(name)}
        turned = config.llama.rotary_dim
        halves = {name: to_halves(state[name], heads, turned) for name, heads in rotated.items()}
        yield Reading("rotary", "rotary neighbors in place of halves", config, {**state, **halves})

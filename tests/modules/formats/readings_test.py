"""Readings of a head: what they change, and that the head changed so computes what was read in another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from foreign_heads import LAYERS, H, llama, random_eagle3, random_head, state_of

from draftsmith.modules.formats.readings import TRAINER, engine_readings, readings
from draftsmith.modules.llama_config import BASE, RopeScaling, RotarySettings
from draftsmith.modules.pretrained.heads import build_head, stored_tensors


@pytest.mark.parametrize("shape", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_layers_in_the_opposite_order_are_those_states_read_so(shape: dict[str, Any]):
    head = random_eagle3(**shape)
    other = next(one for one in readings(head.config, stored_tensors(head), LAYERS) if "9, 6, 2" in one.label)
    states = torch.randn(5, 3 * H)
    turned = torch.cat(states.chunk(3, -1)[::-1], -1)
    found = build_head("eagle3", other.config, other.state)
    # float32 sums of 36 products in another order.
    torch.testing.assert_close(found.read(states), head.read(turned), rtol=0, atol=1e-4)
    assert not torch.allclose(head.read(states), head.read(turned), atol=0.1)


def test_every_reading_is_a_head_and_says_what_differs():
    target = RotarySettings(500.0, RopeScaling())
    eagle = random_head(llama(qkv_bias=True), fc_bias=True)
    found = {one.label: one for one in readings(eagle.config, state_of(eagle), LAYERS, target)}
    assert list(found) == [
        "rope of base 500 (the target's) in place of base 5000",
        f"rope of base {BASE:g} (the default) in place of base 5000",
        "the feature before the embedding in fc",
        "q and k as if not converted from interleaved pairs",
        "q and k as if converted twice from interleaved pairs",
    ]
    assert [one.label for one in engine_readings(eagle.config, state_of(eagle))] == [
        "no bias of fc", "no bias of q, k and v",
    ]  # fmt: skip
    head = random_eagle3(norm_output=True, norm_before_fc=True)
    state = stored_tensors(head)
    found |= {one.label: one for one in readings(head.config, state, LAYERS)}
    assert {
        "layers 1, 5, 8 in place of 2, 6, 9", "layers 3, 7, 10 in place of 2, 6, 9",
        "norm_output off (as SpecForge 0.2 and verl-SpeCo 0.1 train)", "norm_before_residual on",
        "the state before the embedding in q, k and v",
    } < found.keys()  # fmt: skip
    lost = {one.label: one for one in engine_readings(head.config, state)}
    assert list(lost) == ["drafted ids as the target's own (no d2t)", "the target's states without their norm"]
    for other in lost.values():
        build_head("eagle3", other.config, other.state)
    # What was converted once too often, read as if it were never converted, is the head.
    twice = found["q and k as if converted twice from interleaved pairs"]
    again = {one.label: one for one in readings(twice.config, twice.state, LAYERS)}
    back = again["q and k as if not converted from interleaved pairs"].state
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_norms_of_other_trainers_are_read_but_for_a_factor_of_each_token():
    """ModelOpt's first layer norms the state with both norms; SpecForge may have none before lm_head."""
    head, x = random_eagle3(), 3 * torch.randn(7, H)
    for name in ("layer.input_layernorm", "layer.hidden_norm", "norm"):
        torch.nn.init.uniform_(head.get_submodule(name).weight, 0.5, 1.5)
    twice, bare = (
        build_head("eagle3", one.config, one.state)
        for one in readings(head.config, stored_tensors(head), LAYERS)
        if one.factor == TRAINER
    )
    layer = head.layer
    factors = layer.hidden_norm(layer.input_layernorm(x)) / twice.layer.hidden_norm(x)
    torch.testing.assert_close(factors, factors[:, :1].expand(-1, H))
    assert bool(((factors > 0.8) & (factors < 1.25)).all())
    factors = x / bare.norm(x)
    torch.testing.assert_close(factors, factors[:, :1].expand(-1, H))
    # Nothing is read otherwise where these norms are constant, as at the start of a training.
    for norm in (layer.input_layernorm, head.norm):
        torch.nn.init.ones_(norm.weight)
    assert TRAINER not in {one.factor for one in readings(head.config, stored_tensors(head), LAYERS)}


def test_a_scaling_that_an_export_adds_may_be_left_out():
    yarn = RopeScaling("yarn", 32.0, original_max_position=2048)
    head = random_eagle3(llama(rope_theta=500.0, rope_scaling=yarn))
    other = next(one for one in readings(head.config, stored_tensors(head), LAYERS) if one.factor == "rotary")
    assert other.label.startswith("rope of base 500 (without YaRN, which ModelOpt 0.47 adds at export) in place of ")
    assert RotarySettings.of(other.config.llama) == RotarySettings(500.0, RopeScaling())


def test_a_window_may_be_left_out_counted_otherwise_or_lent():
    windowed = random_eagle3(llama(sliding_window=4), norm_output=True)
    state = stored_tensors(windowed)
    lost = next(one for one in readings(windowed.config, state, LAYERS) if one.factor == "window")
    assert lost.label == "no window in place of 4 tokens" and lost.config.llama == llama()
    others = [one for one in engine_readings(windowed.config, state, 32) if one.factor == "window"]
    assert [one.config.llama.sliding_window for one in others] == [3, 5]
    plain = random_eagle3()
    lent = next(engine_readings(plain.config, stored_tensors(plain), 32))
    assert lent.label == "the target's window of 32 tokens" and lent.config.llama.sliding_window == 32
    long = random_eagle3(llama(max_position=4096))
    assert "a window of 2048 tokens" in [one.label for one in readings(long.config, stored_tensors(long), LAYERS)]

"""EAGLE-3 heads in llama.cpp's GGUF: exact round trips, refusals, and llama.cpp's own reading order of rotary pairs."""

from __future__ import annotations

import pytest
import torch
from foreign_heads import CONTEXT, D2T, PART, TARGET, YARN, facts, llama, random_eagle3

from draftsmith.modules.formats import formats
from draftsmith.modules.formats.gguf import head_from_gguf, head_to_gguf
from draftsmith.modules.formats.llama import to_adjacent, to_halves
from draftsmith.modules.llama_config import RopeScaling
from draftsmith.modules.pretrained.heads import stored_tensors
from draftsmith.modules.types import InputError

FORMAT = formats()["llamacpp", "eagle3"]
KIND = {"general.architecture": "eagle3"}
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
LINEAR = RopeScaling("linear", 2.0, original_max_position=CONTEXT)
STEEP = RopeScaling("yarn", 4.0, original_max_position=64, beta_fast=4.0, beta_slow=0.5)


@pytest.mark.parametrize(
    ("settings", "reduced"),
    [
        ({}, True),
        ({}, False),
        ({"norm_before_fc": True, "aux_layers": (1, 4, 11)}, True),
        ({"norm_before_residual": True, "own_embedding": True}, True),
        ({"llama_config": llama(rope_scaling=LLAMA3, rope_theta=500000.0, head_dim=8)}, True),
        ({"llama_config": llama(rope_scaling=LINEAR, head_dim=8)}, True),
        ({"llama_config": llama(rope_scaling=YARN, head_dim=8)}, True),
        ({"llama_config": llama(rope_scaling=PART, head_dim=8)}, True),
        ({"llama_config": llama(rope_scaling=STEEP, head_dim=16)}, True),
    ],
)
def test_a_head_comes_back_bit_by_bit(settings, reduced):
    head = random_eagle3(reduced=reduced, **settings)
    state = stored_tensors(head)
    metadata, tensors = head_to_gguf(FORMAT.write(head.config, state, torch.float32, TARGET))
    imported = FORMAT.read(head_from_gguf(KIND | metadata, tensors), TARGET)
    assert imported.config == head.config and imported.problems == ()
    assert imported.state.keys() == state.keys()
    assert all(torch.equal(imported.state[name], tensor) for name, tensor in state.items())
    # What llama.cpp reads: ids, not offsets; layers by name; an embedding only if it is not the target's.
    assert not reduced or torch.equal(tensors["d2t"], D2T)
    assert metadata["eagle3.target_layers"] == list(head.config.aux_layers)
    assert ("token_embd.weight" in tensors) == head.config.own_embedding


def test_rotary_pairs_are_neighbors():
    """Scores of rotated neighbors in GGUF's order are those of rotated halves in ours."""
    torch.manual_seed(0)
    heads, dim, place = 2, 8, 3
    angles = place * 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    rows = torch.randn(heads * dim, 5)
    adjacent = to_adjacent(rows, heads)
    assert torch.equal(to_halves(adjacent, heads), rows)
    x = torch.randn(5)
    halves, pairs = (rows @ x).view(heads, dim), (adjacent @ x).view(heads, dim)
    first, second = halves[:, : dim // 2], halves[:, dim // 2 :]
    turned = torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)
    even, odd = pairs[:, ::2], pairs[:, 1::2]
    theirs = torch.stack([even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], -1)
    torch.testing.assert_close((turned[0] * turned[1]).sum(), (theirs[0] * theirs[1]).sum())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fc_norm": True}, "fc_norm: found True, expected no norms.*--version 3"),
        ({"norm_output": True}, "norm_output: found True.*--version 3"),
        ({"llama_config": llama(num_layers=2)}, "num_layers: found 2, expected 1, all that llama.cpp computes"),
        ({"aux_layers": (1, 4)}, r"layers: found \[1, 4\], expected 3 layers"),
        ({"llama_config": llama(qkv_bias=True)}, "qkv_bias"),
        ({"llama_config": llama(sliding_window=4)}, "sliding_window: found 4, expected none: llama.cpp ignores it"),
    ],
)
def test_a_head_that_llamacpp_cannot_serve_is_refused(settings, words):
    with pytest.raises(InputError, match=words):
        FORMAT.check(random_eagle3(**settings).config)


def test_a_target_without_layer_inputs_is_a_problem():
    head = random_eagle3()
    metadata, tensors = head_to_gguf(FORMAT.write(head.config, stored_tensors(head), torch.float32, TARGET))
    package, other = head_from_gguf(KIND | metadata, tensors), facts(model_type="qwen2", num_hidden_layers=12)
    assert [problem.where for problem in FORMAT.read(package, other).problems] == ["target"]

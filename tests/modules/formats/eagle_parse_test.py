"""Public EAGLE-1 directories as heads of ours: what is left out with a word, and what is refused with a remedy."""

from __future__ import annotations

import pytest
import torch
from foreign_heads import CONTEXT, FAMILIES, LLAMA3, H, V, changed, facts, llama, random_head, state_of
from plain_eagle import hidden

from draftsmith.data.heads.directory import build_head
from draftsmith.modules.drafters.eagle.head import EagleHead
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package, TargetFacts
from draftsmith.modules.types import InputError

SYSTEMS = {name: formats()[name, "eagle"] for name in ("eagle", "vllm", "sglang")}
TARGET = facts()
BIAS = torch.arange(1.0, H + 1)
FIRST_NORM, O_BIAS = "layers.0.input_layernorm.weight", "layers.0.self_attn.o_proj.bias"


def written(kind: str, family: str = "llama", dtype: torch.dtype = torch.float32) -> Package:
    head = random_head(FAMILIES[family])
    return SYSTEMS[kind].write(head.config, state_of(head), dtype)


@pytest.mark.parametrize("kind", SYSTEMS)
def test_what_is_not_of_the_head_is_left_out_and_said(kind):
    package = written(kind)
    extra = {
        "lm_head.weight": torch.ones(V, H),
        FIRST_NORM: torch.ones(H),
        "embed_tokens.weight": TARGET.embed_tokens,
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    tensors = {f"model.{name}": tensor for name, tensor in {**package.tensors, **extra}.items()}
    parsed = SYSTEMS[kind].parse(Package(package.config, tensors), TARGET)
    plain = SYSTEMS[kind].parse(package, TARGET)
    assert parsed.config == plain.config and parsed.state.keys() == plain.state.keys()
    assert [note.split()[0] for note in parsed.notes] == [
        "model.lm_head.weight",
        f"model.{FIRST_NORM}",
        "model.embed_tokens.weight",
    ]


@pytest.mark.parametrize("kind", SYSTEMS)
def test_a_bfloat16_copy_of_the_targets_embedding_is_the_targets(kind):
    copy = changed(written(kind), {}, {"embed_tokens.weight": TARGET.embed_tokens.bfloat16()})
    assert "embed_tokens.weight" not in SYSTEMS[kind].parse(copy, TARGET).state
    wide = changed(written(kind), {}, {"embed_tokens.weight": TARGET.embed_tokens.bfloat16().float()})
    narrow = TargetFacts(TARGET.raw, TARGET.embed_tokens.bfloat16())
    assert "embed_tokens.weight" not in SYSTEMS[kind].parse(wide, narrow).state
    with pytest.raises(InputError, match="differs from the target's"):  # float32 of other digits, against float32
        SYSTEMS[kind].parse(wide, TARGET)


def test_fc_bias_is_kept_where_its_system_uses_it():
    tensors = {"fc.bias": BIAS}
    for kind, config in (("eagle", {"bias": True}), ("eagle", {"bias": ...}), ("sglang", {})):
        parsed = SYSTEMS[kind].parse(changed(written(kind), config, tensors), TARGET)
        assert parsed.config.fc_bias and torch.equal(parsed.state["fc.bias"], BIAS)
    for kind in ("eagle", "vllm"):  # with `bias: false`
        parsed = SYSTEMS[kind].parse(changed(written(kind), {}, tensors), TARGET)
        assert not parsed.config.fc_bias and "fc.bias" not in parsed.state
        assert parsed.notes == (f"fc.bias: left out, {SYSTEMS[kind].system} does not use them",)
    for kind in SYSTEMS:
        zero = changed(written(kind), {}, {"fc.bias": torch.zeros(H)})
        parsed = SYSTEMS[kind].parse(zero, TARGET)
        assert (parsed.config.fc_bias, parsed.notes) == (False, ())


def test_a_bias_that_its_system_would_make_up_is_refused_with_the_way_out():
    for kind, config in (("eagle", {"bias": ...}), ("eagle", {"bias": True}), ("sglang", {"bias": ...})):
        copy = changed(written(kind), config, {"fc.bias": None})
        with pytest.raises(InputError, match=r'no fc bias.*Add "bias": false to config.json if'):
            SYSTEMS[kind].parse(copy, TARGET)
    said = SYSTEMS["sglang"].parse(changed(written("sglang"), {"bias": False}, {"fc.bias": None}), TARGET)
    assert not said.config.fc_bias and "would make up a random one" in said.notes[0]
    for kind in SYSTEMS:
        names = [name for name in written(kind, "qwen2").tensors if name.endswith("_proj.bias")]
        copy = changed(written(kind, "qwen2"), {}, dict.fromkeys(names))
        with pytest.raises(InputError, match=r'no qkv bias in the file.*"attention_bias"'):
            SYSTEMS[kind].parse(copy, TARGET)
    copy = changed(written("vllm", "qwen2"), {"attention_bias": True})
    with pytest.raises(InputError, match="no o bias in the file"):
        SYSTEMS["vllm"].parse(copy, TARGET)


def test_attention_and_mlp_biases_are_kept_where_their_system_uses_them():
    o_bias = changed(written("sglang", "qwen2"), {}, {O_BIAS: BIAS})
    parsed = SYSTEMS["sglang"].parse(o_bias, TARGET)
    assert parsed.config.llama.o_bias and torch.equal(parsed.state[O_BIAS], BIAS)

    mlp = {f"layers.0.mlp.{name}.bias": torch.ones(size) for name, size in
           (("gate_proj", 10), ("up_proj", 10), ("down_proj", H))}  # fmt: skip
    assert SYSTEMS["vllm"].parse(changed(written("vllm"), {"mlp_bias": True}, mlp), TARGET).config.llama.mlp_bias
    parsed = SYSTEMS["sglang"].parse(changed(written("sglang"), {"mlp_bias": True}, mlp), TARGET)
    assert not parsed.config.llama.mlp_bias and "SGLang does not use them" in parsed.notes[0]


@pytest.mark.parametrize("kind", SYSTEMS)
@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({}, {"layers.0.foo.weight": BIAS, "d2t": BIAS}, "d2t is unknown, layers.0.foo.weight is unknown"),
        ({}, {"fc.weight": None}, "fc.weight is missing"),
        ({}, {"fc.weight": torch.ones(H, 3 * H)}, r"fc.weight is \[12, 36\] in place of \[12, 24\]"),
        ({}, {"embed_tokens.weight": torch.ones(V, H)}, "an embedding that differs from the target's"),
        ({}, {"model.fc.weight": torch.ones(H, 2 * H)}, "fc.weight twice"),
        ({"rope_theta": 77.0}, {}, "rope_theta 77 but rope_parameters.rope_theta 5000"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "found dynamic"),
        ({"rope_parameters": ..., "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, {}, "found yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, {}, "partial_rotary_factor"),
        ({"vocab_size": V - 1}, {}, "vocab_size: found 19, expected the target's whole vocabulary .20."),
        ({"draft_vocab_size": 8}, {}, "draft_vocab_size: found 8"),
        ({"hot_vocab_size": 8}, {}, "hot_vocab_size: found 8"),
        ({"logit_scale": 0.5}, {}, "logit_scale: found 0.5"),
        ({"hidden_act": "gelu"}, {}, "hidden_act: found gelu"),
        ({"quantization_config": {"bits": 4}}, {}, "quantization_config"),
    ],
)
def test_what_our_head_cannot_be_is_refused(kind, config, tensors, words):
    with pytest.raises(InputError, match=words):
        parsed = SYSTEMS[kind].parse(changed(written(kind), config, tensors), TARGET)
        build_head("eagle", parsed.config, parsed.state)


@pytest.mark.parametrize("kind", SYSTEMS)
def test_without_a_target_an_embedding_is_refused_and_a_plain_head_is_not(kind):
    assert SYSTEMS[kind].parse(written(kind), None).config.llama.max_position == CONTEXT
    with pytest.raises(InputError, match="Pass --target"):
        SYSTEMS[kind].parse(changed(written(kind), {}, {"embed_tokens.weight": TARGET.embed_tokens}), None)
    with pytest.raises(InputError, match=r"hidden_size.*target's 99"):
        SYSTEMS[kind].parse(written(kind), facts(hidden_size=99))


def test_a_table_of_positions_grows_to_the_targets():
    parsed = SYSTEMS["eagle"].parse(written("eagle"), facts(max_position_embeddings=4 * CONTEXT))
    assert parsed.config.llama.max_position == 4 * CONTEXT
    assert parsed.notes == ("max_position_embeddings 64 is raised to the target's 256, as vLLM does",)


def test_linear_scaling_on_another_base_is_two_things_to_two_systems():
    package = written("vllm", "linear rope, other base")
    assert SYSTEMS["vllm"].parse(package, TARGET).config.llama.rope_theta == 5000
    new_only = changed(written("eagle"), {"rope_theta": ..., "rope_scaling": ...})
    with pytest.raises(InputError, match=r"found base 5000, expected base 10000"):
        SYSTEMS["eagle"].parse(new_only, TARGET)
    with pytest.raises(InputError, match=r"expected base 10000, .*--format vllm"):
        SYSTEMS["eagle"].parse(package, TARGET)


@pytest.mark.parametrize("kind", SYSTEMS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "two layers"])
def test_a_parsed_head_computes_what_its_system_does(kind, family):
    """bfloat16 files: the parser and the reading are two codes that end in one function."""
    package = written(kind, family, torch.bfloat16)
    parsed, reading = SYSTEMS[kind].parse(package, TARGET), SYSTEMS[kind].read(package, TARGET)
    head = EagleHead(parsed.config)
    head.load_state_dict(parsed.state)
    torch.manual_seed(1)
    embeds, features = torch.randn(9, H), torch.randn(9, H)
    # float32; the issue's own bound for the check
    torch.testing.assert_close(
        hidden(reading, embeds, features), head(embeds[None], features[None])[0], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_old_and_new_spelling_give_the_same_head(kind):
    head = random_head(llama(rope_scaling=LLAMA3))
    package = SYSTEMS[kind].write(head.config, state_of(head), torch.float32)
    for one in ({"rope_parameters": ...}, {"rope_theta": ..., "rope_scaling": ...}):
        assert SYSTEMS[kind].parse(changed(package, one), TARGET).config == head.config
        rotation = SYSTEMS[kind].read(changed(package, one), TARGET).settings["llama"]
        assert rotation == SYSTEMS[kind].read(package, TARGET).settings["llama"]

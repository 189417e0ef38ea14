"""EAGLE-1 heads in three systems' directories: round trips, what an import keeps and refuses, and planted defects."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from foreign_heads import CONTEXT, EAGLE1, FAMILIES, H, V, changed, facts, llama, rand, random_head, state_of, where
from oracles.heads import PlainEagle
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.formats.base import ImportedHead, Package, TargetFacts
from draftsmith.modules.llama_config import RopeScaling
from draftsmith.modules.rotary import rope_frequencies
from draftsmith.modules.types import InputError

TARGET = facts()
BIAS = torch.arange(1.0, H + 1)
FIRST_NORM, O_BIAS = "layers.0.input_layernorm.weight", "layers.0.self_attn.o_proj.bias"
# Families that a system refuses.
NOT_HELD = {"eagle": {"llama3 rope", "wide heads", "linear rope, other base"}, "vllm": set(), "sglang": set()}
PAIRS = [(name, family) for name in EAGLE1 for family in FAMILIES if family not in NOT_HELD[name]]


def written(name: str, family: str = "llama", dtype: torch.dtype = torch.float32) -> Package:
    head = random_head(FAMILIES[family])
    return EAGLE1[name].write(head.config, state_of(head), dtype)


def head_of(imported: ImportedHead) -> EagleHead:
    head = EagleHead(imported.config).requires_grad_(False)
    head.load_state_dict(imported.state)
    return head


@pytest.mark.parametrize(("name", "family"), PAIRS)
def test_a_head_comes_back_bit_by_bit_and_computes_what_a_plain_implementation_does(name, family):
    for dtype in (torch.float32, torch.bfloat16):
        package = written(name, family, dtype)
        imported = EAGLE1[name].read(package, TARGET)
        assert imported.config == random_head(FAMILIES[family]).config
        assert imported.problems == () and imported.notes == ()
        state = state_of(random_head(FAMILIES[family]))
        assert imported.state.keys() == state.keys()
        assert all(torch.equal(imported.state[key], tensor.to(dtype)) for key, tensor in state.items())
        embeds, features = rand(2, 9, H)
        plain = PlainEagle(package.tensors, FAMILIES[family]).hidden(embeds, features)
        ours = head_of(imported).float().unroll(embeds[None], features[None], 1)[0][0]
        torch.testing.assert_close(ours.double(), plain, rtol=0, atol=1e-4)  # float32 against float64


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_rope_that_the_head_has(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(written("vllm", family).config)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert torch.allclose(LlamaRotaryEmbedding(config).inv_freq, rope_frequencies(FAMILIES[family]), rtol=1e-6)
    assert config.rms_norm_eps == FAMILIES[family].rms_eps


@pytest.mark.parametrize(
    ("changes", "fc_bias", "reason"),
    [
        ({}, True, "fc_bias: found True, expected no bias: vLLM drops it"),
        ({"qk_norm": True}, False, "qk_norm: found True"),
        ({"o_bias": True}, False, "o_bias: found True"),
        ({"mlp_bias": True}, False, "mlp_bias: found True"),
        ({"num_heads": 5, "num_kv_heads": 5, "head_dim": 4}, False, "(num_heads|head_dim): found"),
    ],
)
def test_a_head_that_no_system_holds_is_refused(changes, fc_bias, reason):
    config = EagleConfig(dataclasses.replace(FAMILIES["llama"], **changes), fc_bias)
    for format in EAGLE1.values():
        assert not format.holds(config)
        with pytest.raises(InputError, match=reason):
            format.check(config)


def test_safeailab_refuses_what_its_code_reads_in_another_way():
    for family, reason in (
        ("llama3 rope", "rope_scaling: found llama3"),
        ("wide heads", "head_dim: found 8, expected hidden_size / num_heads = 4"),
        ("linear rope, other base", "rope_scaling: found linear by 4 on base 5000"),
    ):
        with pytest.raises(InputError, match=f"{reason}.*--format vllm"):
            EAGLE1["eagle"].check(EagleConfig(FAMILIES[family]))
    config = EagleConfig(llama(rope_theta=10000.0, rope_scaling=RopeScaling("linear", 0.5)))
    with pytest.raises(InputError, match="a factor over 1"):
        EAGLE1["eagle"].check(config)


@pytest.mark.parametrize("name", EAGLE1)
def test_tensors_that_are_not_the_heads_are_left_out_with_a_note(name):
    package = written(name)
    extra = {
        "lm_head.weight": TARGET.lm_head,
        FIRST_NORM: torch.ones(H),
        "embed_tokens.weight": TARGET.embed_tokens,
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    tensors = {f"model.{key}": tensor for key, tensor in {**package.tensors, **extra}.items()}
    imported = EAGLE1[name].read(Package(package.config, tensors), TARGET)
    plain = EAGLE1[name].read(package, TARGET)
    assert imported.config == plain.config and imported.state.keys() == plain.state.keys()
    left_out = ["model.embed_tokens.weight", "lm_head.weight", FIRST_NORM]
    assert [note.split()[0] for note in imported.notes] == left_out
    # vLLM raises for what it does not know; all of them know the names without the prefix only.
    problems = ["model."] + (left_out[1:] if name == "vllm" else [])
    assert where(imported) == problems


def test_a_bfloat16_copy_of_the_targets_embedding_is_the_targets():
    eagle, embedding = EAGLE1["eagle"], TARGET.embed_tokens
    copy = changed(written("eagle"), {}, {"embed_tokens.weight": embedding.bfloat16()})
    assert "embed_tokens.weight" not in eagle.read(copy, TARGET).state
    wide = changed(written("eagle"), {}, {"embed_tokens.weight": embedding.bfloat16().float()})
    assert "embed_tokens.weight" not in eagle.read(wide, TargetFacts(TARGET.raw, embedding.bfloat16())).state
    with pytest.raises(InputError, match="differs from the target's"):  # float32 of other digits, against float32
        eagle.read(wide, TARGET)
    with pytest.raises(InputError, match="Pass --target"):
        eagle.read(copy, None)


def test_fc_bias_is_kept_if_its_system_uses_it():
    for name, config in (("eagle", {"bias": True}), ("eagle", {"bias": ...}), ("sglang", {})):
        imported = EAGLE1[name].read(changed(written(name), config, {"fc.bias": BIAS}), TARGET)
        assert imported.config.fc_bias and torch.equal(imported.state["fc.bias"], BIAS) and not imported.problems
    for name in ("eagle", "vllm"):  # with `bias: false`
        imported = EAGLE1[name].read(changed(written(name), {}, {"fc.bias": BIAS}), TARGET)
        assert not imported.config.fc_bias and "fc.bias" not in imported.state
        assert imported.notes == (f"fc.bias: left out, {EAGLE1[name].system} does not use them",)
        assert where(imported) == ["fc.bias"]
    for name in EAGLE1:
        zero = EAGLE1[name].read(changed(written(name), {}, {"fc.bias": torch.zeros(H)}), TARGET)
        assert (zero.config.fc_bias, zero.notes, zero.problems) == (False, (), ())


def test_a_bias_that_its_system_would_make_up_is_refused_with_the_remedy():
    for name, config in (("eagle", {"bias": ...}), ("eagle", {"bias": True}), ("sglang", {"bias": ...})):
        copy = changed(written(name), config, {"fc.bias": None})
        with pytest.raises(InputError, match=r'no fc bias.*Correct config.json: "bias"'):
            EAGLE1[name].read(copy, TARGET)
    imported = EAGLE1["sglang"].read(changed(written("sglang"), {}, {"fc.bias": None}), TARGET)
    assert not imported.config.fc_bias and where(imported) == ["fc.bias"]
    for name in EAGLE1:
        biases = [key for key in written(name, "qwen2").tensors if key.endswith("_proj.bias")]
        with pytest.raises(InputError, match="no qkv bias in the file"):
            EAGLE1[name].read(changed(written(name, "qwen2"), {}, dict.fromkeys(biases)), TARGET)
    with pytest.raises(InputError, match="no o bias in the file"):
        EAGLE1["vllm"].read(changed(written("vllm", "qwen2"), {"attention_bias": True}), TARGET)


def test_attention_and_mlp_biases_are_kept_if_their_system_uses_them():
    imported = EAGLE1["sglang"].read(changed(written("sglang", "qwen2"), {}, {O_BIAS: BIAS}), TARGET)
    assert imported.config.llama.o_bias and torch.equal(imported.state[O_BIAS], BIAS)
    sizes = {"gate_proj": 10, "up_proj": 10, "down_proj": H}
    mlp = {f"layers.0.mlp.{name}.bias": torch.ones(size) for name, size in sizes.items()}
    assert EAGLE1["vllm"].read(changed(written("vllm"), {"mlp_bias": True}, mlp), TARGET).config.llama.mlp_bias
    imported = EAGLE1["sglang"].read(changed(written("sglang"), {"mlp_bias": True}, mlp), TARGET)
    assert not imported.config.llama.mlp_bias and "SGLang does not use them" in imported.notes[0]


REFUSED = [
    ({}, {"layers.0.foo.weight": BIAS, "d2t": BIAS}, "d2t is unknown, layers.0.foo.weight is unknown"),
    ({}, {"norm.weight": torch.ones(H)}, "norm.weight: found a norm of its states, as NeMo Automodel trains"),
    ({}, {"fc.weight": None}, "fc.weight is missing"),
    ({}, {"fc.weight": torch.ones(H, 3 * H)}, r"fc.weight is \[12, 36\] in place of \[12, 24\]"),
    ({}, {"fc.weight": torch.ones(H, 2 * H).long()}, "fc.weight is int64 in place of float32"),
    ({}, {"embed_tokens.weight": torch.ones(V, H)}, "an embedding that differs from the target's"),
    ({}, {"model.fc.weight": torch.ones(H, 2 * H)}, "fc.weight twice"),
    ({"num_attention_heads": 6}, {}, r"self_attn.q_proj.weight is \[12, 12\] in place of \[24, 12\]"),
    ({"rope_parameters": ..., "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, {}, "found longrope"),
    ({"rope_parameters": ..., "rope_scaling": {"rope_type": "linear"}}, {}, "rope_scaling: found no factor"),
    ({"rms_norm_eps": "tiny"}, {}, "rms_norm_eps: found 'tiny', expected a number"),
    ({"vocab_size": V - 1}, {}, "found vocab_size 19, expected the target's vocab_size 20. This is another"),
    ({"draft_vocab_size": 8}, {}, "draft_vocab_size: found 8"),
    ({"logit_scale": 0.5}, {}, "logit_scale: found 0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "words"), REFUSED)
def test_a_head_that_ours_cannot_be_is_refused_in_one_line(config, tensors, words):
    with pytest.raises(InputError, match=words) as error:
        EAGLE1["eagle"].read(changed(written("eagle"), config, tensors), TARGET)
    assert "\n" not in str(error.value)


# Edit of config and tensors -> the system's problem, None where it computes the same.
DEFECTS = {
    "stray lm_head": ({}, {"lm_head.weight": torch.zeros(V, H)}, dict.fromkeys(EAGLE1, "lm_head.weight")),
    "another class": ({"architectures": ["Qwen3ForCausalLM"]}, {},
                      {"eagle": None, "vllm": "architectures", "sglang": "architectures"}),
    "another model": ({"model_type": "gemma3"}, {}, {"eagle": None, "vllm": "model_type", "sglang": "model_type"}),
    "the same layers": ({"model_type": "qwen2"}, {}, dict.fromkeys(EAGLE1)),
    "another base": ({"model_type": "mixtral", "rope_theta": ...}, {}, {"vllm": "model_type", "sglang": "model_type"}),
    "one layer_type": ({"layer_types": ["full_attention"]}, {}, {"eagle": None, "vllm": "layer_types"}),
    "tied tables": ({"tie_word_embeddings": True}, {}, {"eagle": None, "vllm": None, "sglang": "tie_word_embeddings"}),
    "a shorter context": ({"max_position_embeddings": CONTEXT // 2}, {},
                          {"eagle": None, "vllm": None, "sglang": "max_position_embeddings"}),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_directory_that_a_system_reads_in_another_way_has_a_problem(name):
    config, tensors, expected = DEFECTS[name]
    for system, problem in expected.items():
        imported = EAGLE1[system].read(changed(written(system), config, tensors), TARGET)
        assert where(imported) == ([] if problem is None else [problem])


def test_safeailab_ignores_a_head_dim_and_knows_two_keys_of_rope_scaling():
    imported = EAGLE1["eagle"].read(written("vllm", "wide heads"), TARGET)
    assert where(imported) == ["head_dim"]
    imported = EAGLE1["eagle"].read(written("vllm", "llama3 rope"), TARGET)
    assert where(imported) == ["rope_theta", "rope_scaling"]


def test_safeailab_reads_another_base_than_vllm():
    package = written("vllm", "linear rope, other base")
    assert EAGLE1["vllm"].read(package, TARGET).config.llama.rope_theta == 5000
    problem, _ = EAGLE1["eagle"].read(package, TARGET).problems
    assert "computes with base 10000, linear scaling by 4, not with base 5000" in problem.text
    new_only = changed(written("eagle"), {"rope_theta": ..., "rope_scaling": ...})
    (problem,) = EAGLE1["eagle"].read(new_only, TARGET).problems
    assert "computes with base 10000, not with base 5000" in problem.text


def test_sizes_of_the_target():
    imported = EAGLE1["eagle"].read(written("eagle"), facts(max_position_embeddings=4 * CONTEXT))
    assert imported.config.llama.max_position == 4 * CONTEXT
    assert imported.notes == ("max_position_embeddings 64 is raised to the target's 256, as vLLM does",)
    assert EAGLE1["eagle"].read(written("eagle"), None).config.llama.max_position == CONTEXT
    with pytest.raises(InputError, match=r"hidden_size.*target's hidden_size 99"):
        EAGLE1["eagle"].read(written("eagle"), facts(hidden_size=99))

"""One broken copy for every way in which an EAGLE-1 directory goes wrong unnoticed, and what each system makes of it.

What is expected of a system is what its own source does (vLLM 0.33.0, SGLang 0.5.23, SafeAILab/EAGLE cb7e084).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from foreign_heads import CONTEXT, FAMILIES, LLAMA3, H, V, changed, facts, llama, random_head, state_of
from plain_eagle import hidden
from torch import Tensor, nn

from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Package
from draftsmith.modules.types import InputError

SYSTEMS = {name: formats()[name, "eagle"] for name in ("eagle", "vllm", "sglang")}
TARGET = facts()
Q_BIAS, Q, NORM = "layers.0.self_attn.q_proj.bias", "layers.0.self_attn.q_proj.weight", "post_attention_layernorm"
FIRST_NORM = "layers.0.input_layernorm.weight"


def written(kind: str, family: str = "llama") -> Package:
    head = random_head(FAMILIES[family])
    return SYSTEMS[kind].write(head.config, state_of(head), torch.float32)


@dataclass(frozen=True)
class Trap:
    """A broken copy, and (level, where, a part of the text) that each system is to report; None: it reads it well."""

    config: dict[str, Any]
    tensors: dict[str, Tensor | None]
    eagle: tuple[str, str, str] | None
    vllm: tuple[str, str, str] | None
    sglang: tuple[str, str, str] | None
    family: str = "llama"


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NO_LM_HEAD = "raises: There is no module or parameter named 'lm_head' in EagleLlamaForCausalLM"
WHOLE_HEAD = "drafts from the target's whole lm_head"
TRAPS = {
    "stray lm_head of its own": Trap({}, {"lm_head.weight": rand(V, H)},
        ("error", "lm_head.weight", "takes the target's, which differs"),
        ("error", "lm_head.weight", NO_LM_HEAD),
        ("error", "lm_head.weight", "takes the target's, which differs")),
    "stray copy of the target's lm_head": Trap({}, {"lm_head.weight": TARGET.lm_head},
        ("note", "lm_head.weight", "which is the same"),
        ("error", "lm_head.weight", NO_LM_HEAD),
        ("note", "lm_head.weight", "which is the same")),
    "fc bias": Trap({}, {"fc.bias": rand(H)},
        ("error", "fc.bias", "drops it, because config.json says `bias: false`"),
        ("error", "fc.bias", "drops it"),
        None),
    "fc bias of zeros": Trap({}, {"fc.bias": torch.zeros(H)},
        ("note", "fc.bias", "nothing is lost"),
        ("note", "fc.bias", "nothing is lost"),
        None),
    "no fc bias": Trap({}, {"fc.bias": None},
        None,
        None,
        ("error", "fc.bias", "it keeps random numbers")),
    "fc bias and `bias: true`": Trap({"bias": True}, {"fc.bias": rand(H)},
        None,
        ("error", "bias", "bias of q, k, v and o, and never as that of fc"),
        ("error", "bias", "reads it as the bias of q, k, v and o")),
    "`bias` absent": Trap({"bias": ...}, {"fc.bias": None},
        ("error", "fc.bias", "it keeps random numbers"),
        ("note", "bias", "neither fc nor"),
        ("error", "fc.bias", "it keeps random numbers")),
    "lost q bias": Trap({}, {Q_BIAS: None},
        ("error", Q_BIAS, "it keeps random numbers"),
        ("error", Q_BIAS, "it keeps uninitialised memory"),
        ("error", Q_BIAS, "it keeps zeros"), "qwen2"),
    "q bias that the config does not announce": Trap({"qkv_bias": ..., "attention_bias": ...}, {},
        ("error", Q_BIAS, "drops it, because it has no such parameter"),
        ("error", Q_BIAS, "drops it, as it drops every bias"),
        ("error", Q_BIAS, "drops it, because `attention_bias` is not set"), "qwen2"),
    "o bias absent beside q, k and v": Trap({}, {"layers.0.self_attn.o_proj.bias": None},
        None,
        None,
        ("note", "layers.0.self_attn.o_proj.bias", "takes zeros"), "qwen2"),
    "announced as attention_bias": Trap({"qkv_bias": ..., "attention_bias": True}, {},
        ("error", Q_BIAS, "drops it"),
        ("error", "layers.0.self_attn.o_proj.bias", "uninitialised memory"),
        None, "qwen2"),
    "renamed tensor": Trap({}, {Q: None, "layers.0.self_attn.query.weight": rand(H, H)},
        ("error", "layers.0.self_attn.query.weight", "because it has no such parameter"),
        ("error", "layers.0.self_attn.query.weight", "named 'layers.0.self_attn.query' in LlamaModel"),
        ("error", "layers.0.self_attn.query.weight", "because it has no such parameter")),
    "missing matrix": Trap({}, {Q: None},
        ("error", Q, "it keeps random numbers"),
        ("error", Q, "it keeps uninitialised memory"),
        ("error", Q, "it keeps random numbers")),
    "missing norm": Trap({}, {f"layers.0.{NORM}.weight": None},
        ("error", f"layers.0.{NORM}.weight", "it keeps ones"),
        ("error", f"layers.0.{NORM}.weight", "it keeps ones"),
        ("error", f"layers.0.{NORM}.weight", "it keeps ones")),
    "norm before layer 0": Trap({}, {FIRST_NORM: rand(H)},
        ("error", FIRST_NORM, "drops it"),
        ("error", FIRST_NORM, "named 'layers.0.input_layernorm.weight' in LlamaModel"),
        ("error", FIRST_NORM, "drops it")),
    "norm of q": Trap({}, {"layers.0.self_attn.q_norm.weight": rand(4)},
        ("error", "layers.0.self_attn.q_norm.weight", "drops it"),
        ("error", "layers.0.self_attn.q_norm.weight", "named 'layers.0.self_attn.q_norm' in LlamaModel"),
        ("error", "layers.0.self_attn.q_norm.weight", "drops it")),
    "bias where vLLM has no module": Trap({}, {"layers.0.self_attn.q_norm.bias": rand(4)},
        ("error", "layers.0.self_attn.q_norm.bias", "drops it"),
        ("error", "layers.0.self_attn.q_norm.bias", "named 'layers.0.self_attn.q_norm' in LlamaModel"),
        ("error", "layers.0.self_attn.q_norm.bias", "drops it")),
    "more layers than the config says": Trap({"num_hidden_layers": 1}, {},
        ("error", "layers.1.self_attn.q_proj.weight", "drops it"),
        ("error", "layers.1.self_attn.q_proj.weight", "named 'layers.1' in LlamaModel"),
        ("error", "layers.1.self_attn.q_proj.weight", "drops it"), "two layers"),
    "fewer layers than the config says": Trap({"num_hidden_layers": 2}, {},
        ("error", "layers.1.self_attn.q_proj.weight", "it keeps random numbers"),
        ("error", "layers.1.self_attn.q_proj.weight", "uninitialised"),
        ("error", "layers.1.self_attn.q_proj.weight", "it keeps random numbers")),
    "wrong shape": Trap({}, {Q: rand(H, H - 1)},
        ("error", Q, "raises: size mismatch for"),
        ("error", Q, "raises"),
        ("error", Q, "raises")),
    "rotary buffer": Trap({}, {"layers.0.self_attn.rotary_emb.inv_freq": rand(2)},
        ("note", "layers.0.self_attn.rotary_emb.inv_freq", "computes its own"),
        ("note", "layers.0.self_attn.rotary_emb.inv_freq", "computes its own"),
        ("note", "layers.0.self_attn.rotary_emb.inv_freq", "computes its own")),
    "another embedding": Trap({}, {"embed_tokens.weight": rand(V, H)},
        ("note", "embed_tokens.weight", "with the file's table; which differs"),
        ("note", "embed_tokens.weight", "with the file's table; which differs"),
        ("error", "embed_tokens.weight", "silently puts the target's in its place, which differs")),
    "the target's embedding": Trap({}, {"embed_tokens.weight": TARGET.embed_tokens},
        ("note", "embed_tokens.weight", "which is the same"),
        ("note", "embed_tokens.weight", "identical to the target's"),
        ("note", "embed_tokens.weight", "which is the same")),
    "truncated vocabulary": Trap({"vocab_size": V - 4}, {},
        ("note", "vocab_size", "the tables are the target's"),
        ("error", "vocab_size", f"drafts only the first {V - 4} of the target's {V} tokens"),
        ("error", "vocab_size", f"drafts only the first {V - 4} of the target's {V} tokens")),
    "truncated vocabulary with its embedding": Trap({"vocab_size": V - 4}, {"embed_tokens.weight": rand(V - 4, H)},
        ("error", "embed_tokens.weight", "raises: size mismatch"),
        ("error", "vocab_size", "drafts only the first"),
        ("error", "embed_tokens.weight", "silently puts the target's")),
    "draft_vocab_size": Trap({"draft_vocab_size": 8}, {},
        ("error", "draft_vocab_size", WHOLE_HEAD),
        ("error", "draft_vocab_size", WHOLE_HEAD),
        ("error", "draft_vocab_size", WHOLE_HEAD)),
    "hot_vocab_size": Trap({"hot_vocab_size": 8}, {},
        ("note", "hot_vocab_size", "does not read it"),
        ("note", "hot_vocab_size", "does not read it"),
        ("error", "hot_vocab_size", "without --speculative-token-map")),
    "the other system's architecture": Trap({"architectures": ["LlamaForCausalLMEagle"]}, {},
        ("note", "architectures", "does not read it"),
        ("error", "architectures", "raises: Model architectures ['LlamaForCausalLMEagle'] are not supported for now"),
        ("note", "architectures", "builds LlamaForCausalLMEagle")),
    "an ordinary Llama's architecture": Trap({"architectures": ["LlamaForCausalLM"]}, {},
        ("note", "architectures", "does not read it"),
        ("note", "architectures", "builds EagleLlamaForCausalLM for LlamaForCausalLM"),
        ("error", "architectures", "builds an ordinary Llama")),
    "no architecture": Trap({"architectures": ...}, {},
        ("note", "architectures", "does not read it"),
        ("error", "architectures", "no model architectures are specified"),
        ("error", "architectures", "raises: 'NoneType' object is not subscriptable")),
    "rope in the new spelling only": Trap({"rope_theta": ..., "rope_scaling": ...}, {},
        ("error", "rope_theta", "computes with base 10000, not with base 5000"),
        None,
        None),
    "two bases": Trap({"rope_theta": 123.0}, {},
        ("error", "rope_parameters", "computes with base 123, but config.json contradicts itself"),
        ("error", "rope_parameters", "computes with base 5000, but config.json contradicts itself"),
        ("error", "rope_parameters", "computes with base 5000, but config.json contradicts itself")),
    "scaling in the old spelling only": Trap({"rope_scaling": {"type": "linear", "factor": 2.0}}, {},
        ("error", "rope_theta", "under rope_scaling its base is always 10000"),
        ("error", "rope_parameters", "contradicts itself"),
        ("error", "rope_parameters", "contradicts itself")),
    "dynamic scaling": Trap({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": ...}, {},
        ("error", "rope_scaling", "that this check does not follow"),
        ("error", "rope_scaling", "that this check does not follow"),
        ("error", "rope_scaling", "that this check does not follow")),
    "llama3 scaling": Trap({"rope_scaling": SCALED, "rope_parameters": ...}, {},
        ("error", "rope_scaling", "raises: `rope_scaling` must be a dictionary"),
        None,
        None),
    "llama3 scaling by two fields": Trap({"rope_scaling": {"rope_type": "llama3", "factor": 8.0},
                                          "rope_parameters": ...}, {},
        ("error", "rope_scaling", "raises: `rope_scaling`'s name field must be one of ['linear', 'dynamic'], got None"),
        ("error", "rope_scaling", "Missing required keys in `rope_parameters`: low_freq_factor, high_freq_factor"),
        ("error", "rope_scaling", "Missing required keys in `rope_parameters`: low_freq_factor, high_freq_factor")),
    "a part of every head rotated": Trap({"partial_rotary_factor": 0.5}, {},
        None,
        ("error", "rope_scaling", "partial_rotary_factor 0.5"),
        ("error", "rope_scaling", "partial_rotary_factor 0.5")),
    "head_dim": Trap({"head_dim": 8}, {},
        ("error", "head_dim", "ignores 8 and takes hidden_size / 3 heads = 4"),
        ("error", Q, "raises"),
        ("error", Q, "raises")),
    "a smaller head_dim": Trap({"head_dim": 2}, {},
        ("error", "head_dim", "ignores 2 and takes hidden_size / 3 heads = 4"),
        ("error", Q, "takes the first 6 of its 12 rows"),
        ("error", Q, "takes the first 6 of its 12 rows")),
    "a smaller MLP": Trap({"intermediate_size": 8}, {},
        ("error", "layers.0.mlp.down_proj.weight", "raises: size mismatch"),
        ("error", "layers.0.mlp.down_proj.weight", "takes the first 8 of its 10 columns"),
        ("error", "layers.0.mlp.down_proj.weight", "takes the first 8 of its 10 columns")),
    "a larger MLP": Trap({"intermediate_size": 12}, {},
        ("error", "layers.0.mlp.up_proj.weight", "raises: size mismatch"),
        ("error", "layers.0.mlp.up_proj.weight", "raises"),
        ("error", "layers.0.mlp.up_proj.weight", "adds 2 rows of zeros")),
    "q, k and v in one": Trap({}, {Q: None, Q.replace("q_", "k_"): None, Q.replace("q_", "v_"): None,
                                   Q.replace("q_", "qkv_"): rand(H + 8, H)},
        ("error", Q, "it keeps random numbers"),
        ("note", Q.replace("q_", "qkv_"), "takes it for q_proj, k_proj, v_proj in one"),
        ("note", Q.replace("q_", "qkv_"), "takes it for q_proj, k_proj, v_proj in one")),
    "layer_types": Trap({"layer_types": ["full_attention"]}, {},
        None,
        ("error", "layer_types", "raises: effective_layer_idx: 6 is out of bounds"),
        None),
    "logit_scale": Trap({"logit_scale": 0.5}, {},
        ("note", "logit_scale", "does not read it"),
        ("error", "logit_scale", "multiplies the draft's logits by 0.5"),
        ("note", "logit_scale", "does not read it")),
    "another activation": Trap({"hidden_act": "gelu"}, {},
        ("error", "hidden_act", "computes with gelu"),
        ("error", "hidden_act", "raises: Unsupported activation: gelu"),
        ("error", "hidden_act", "raises: Unsupported activation: gelu")),
    "shorter than the target": Trap({"max_position_embeddings": 16}, {},
        ("note", "max_position_embeddings", f"to the target's {CONTEXT}"),
        ("error", "max_position_embeddings", "does not draft beyond 16 tokens"),
        ("error", "max_position_embeddings", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")),
    "no rms_norm_eps": Trap({"rms_norm_eps": ...}, {},
        ("note", "rms_norm_eps", "takes 1e-06"),
        ("note", "rms_norm_eps", "takes 1e-06"),
        ("note", "rms_norm_eps", "takes 1e-06")),
    "tied embeddings": Trap({"tie_word_embeddings": True}, {},
        None,
        None,
        ("error", "tie_word_embeddings", "raises")),
    "quantised": Trap({"quantization_config": {"quant_method": "fp8"}}, {},
        ("error", "quantization_config", "does not follow"),
        ("error", "quantization_config", "does not follow"),
        ("error", "quantization_config", "does not follow")),
    "of another model type": Trap({"model_type": "qwen2"}, {},
        None,
        ("error", "model_type", "builds another model"),
        ("note", "model_type", "takes 'qwen2'")),
    "another width than the target's": Trap({}, {},
        ("error", "hidden_size", "cannot fuse features of width 99"),
        ("error", "hidden_size", "cannot fuse features of width 99"),
        ("error", "hidden_size", "cannot fuse features of width 99")),
}  # fmt: skip
CASES = [(trap, kind) for trap in TRAPS for kind in SYSTEMS]


@pytest.mark.parametrize(("trap", "kind"), CASES)
def test_each_system_meets_a_broken_copy_in_its_own_way(trap, kind):
    case = TRAPS[trap]
    package = changed(written(kind, case.family), case.config, case.tensors)
    target = facts(hidden_size=99) if "width" in trap else TARGET
    reading = SYSTEMS[kind].read(package, target)
    expected = getattr(case, kind)
    if expected is None:
        assert reading.errors == []
    else:
        level, where, text = expected
        found = [f for f in reading.findings if f.where == where and f.level == level]
        assert any(text in finding.text for finding in found), [str(f) for f in reading.findings]
        assert reading.errors or level == "note", "a copy that is broken here cannot pass"
        if level == "note":
            assert reading.errors == [], "what is harmless here must pass"
    # Whatever the copy: no tensor is without a trace, and none of the system's parameters without a value.
    named = {finding.where for finding in reading.findings}
    assert package.tensors.keys() <= named | set(reading.used)
    unknown = {n for n, tensor in reading.weights.items() if tensor.isnan().any()}
    assert unknown <= named


@pytest.mark.parametrize("kind", SYSTEMS)
def test_with_the_prefix_model_no_system_finds_anything(kind):
    package = written(kind)
    package = Package(package.config, {f"model.{name}": tensor for name, tensor in package.tensors.items()})
    reading = SYSTEMS[kind].read(package, TARGET)
    assert reading.used == () and reading.weights["fc.weight"].isnan().all()
    texts = {finding.where: finding.text for finding in reading.errors}
    assert package.tensors.keys() - {"model.fc.bias"} <= texts.keys()
    own = {"eagle": "does not know", "vllm": "named 'model' in LlamaModel", "sglang": "`model.` a second time"}
    assert own[kind] in texts["model.fc.weight"]


@pytest.mark.parametrize("kind", SYSTEMS)
def test_concatenation_in_the_other_order_is_no_matter_of_names_but_of_numbers(kind):
    package = written(kind)
    fc = package.tensors["fc.weight"]
    swapped = changed(package, {}, {"fc.weight": torch.cat([fc[:, H:], fc[:, :H]], dim=1)})
    one, other = SYSTEMS[kind].read(package, TARGET), SYSTEMS[kind].read(swapped, TARGET)
    assert one.errors == other.errors == []
    embeds, features = rand(5, H), rand(5, H).flip(0)
    assert (hidden(one, embeds, features) - hidden(other, embeds, features)).abs().max() > 0.1


def test_safeailabs_silent_loading_is_that_of_torch():
    """`load_state_dict(strict=False)` on modules of its names says what is left out and what is missing."""
    package = changed(
        written("eagle"), {}, {Q: None, "layers.0.foo.weight": rand(2), "fc.bias": rand(H), FIRST_NORM: rand(H)}
    )
    layer = nn.ModuleDict({
        "self_attn": nn.ModuleDict({n: nn.Linear(H, r, bias=False) for n, r in
                                    {"q_proj": H, "k_proj": 4, "v_proj": 4, "o_proj": H}.items()}),
        "mlp": nn.ModuleDict({"gate_proj": nn.Linear(H, 10, False), "up_proj": nn.Linear(H, 10, False),
                              "down_proj": nn.Linear(10, H, False)}),
        NORM: nn.RMSNorm(H),
    })  # fmt: skip
    model = nn.ModuleDict({"fc": nn.Linear(2 * H, H, bias=False), "layers": nn.ModuleList([layer])})
    result = model.load_state_dict(dict(package.tensors), strict=False)
    reading = SYSTEMS["eagle"].read(package, TARGET)
    assert set(result.unexpected_keys) == package.tensors.keys() - set(reading.used)
    assert set(result.missing_keys) == {name for name, tensor in reading.weights.items() if tensor.isnan().any()}


@pytest.mark.parametrize("kind", SYSTEMS)
def test_a_sound_directory_is_described(kind):
    notes = {f.where: f.text for f in SYSTEMS[kind].read(written(kind), TARGET).findings}
    assert "after its final norm, hs[6]" in notes["feature"]
    assert "base 5000, as the target does" in notes["rope_theta"]
    assert "takes the target's" in notes["lm_head"] and "takes the target's" in notes["embed_tokens"]
    other = SYSTEMS[kind].read(written(kind), facts(rope_theta=1e6))
    assert other.errors == [] and any("the target with base 1e+06" in f.text for f in other.findings)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_a_target_of_llama3_rope_gives_is_as_the_target(kind):
    head = random_head(llama(rope_scaling=LLAMA3))
    package = SYSTEMS[kind].write(head.config, state_of(head), torch.float32)
    target = facts(rope_scaling=dict(package.config["rope_scaling"]))
    texts = [f.text for f in SYSTEMS[kind].read(package, target).findings if f.where == "rope_theta"]
    assert texts == [f"{SYSTEMS[kind].system} rotates with base 5000, llama3 scaling by 8, as the target does"]


@pytest.mark.parametrize(
    ("config", "field"),
    [({"hidden_size": "wide"}, "hidden_size"), ({"num_attention_heads": 0}, "num_attention_heads"),
     ({"rope_scaling": "linear"}, "rope_scaling"), ({"rms_norm_eps": None}, "rms_norm_eps")],
)  # fmt: skip
@pytest.mark.parametrize("kind", SYSTEMS)
def test_a_field_that_is_no_number_is_one_line(kind, config, field):
    read: Callable[..., Any] = SYSTEMS[kind].read
    with pytest.raises(InputError, match=field):
        read(changed(written(kind), config), TARGET)

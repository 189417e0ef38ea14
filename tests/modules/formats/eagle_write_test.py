"""EAGLE-1 heads written for other systems: exact round trips, what transformers makes of the config, and refusals."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
import transformers
from foreign_heads import CONTEXT, FAMILIES, LINEAR, LLAMA3, facts, llama, random_head, state_of
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.modules.drafters.eagle.head import EagleConfig
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Served
from draftsmith.modules.layers import rope_frequencies
from draftsmith.modules.types import InputError

FORMATS = {name: formats()[name, "eagle"] for name in ("eagle", "vllm", "sglang")}
NOT_FOR_SAFEAILAB = ("llama3 rope", "wide heads", "linear rope, other base")
PAIRS = [(f, name) for f in FORMATS for name in FAMILIES if not (f == "eagle" and name in NOT_FOR_SAFEAILAB)]


@pytest.mark.parametrize(("kind", "family"), PAIRS)
def test_a_head_comes_back_as_it_was_and_its_system_reads_every_tensor(kind, family):
    head, system = random_head(FAMILIES[family]), FORMATS[kind]
    package = system.write(head.config, state_of(head), torch.float32)
    parsed = system.parse(package, facts())
    assert parsed.config == head.config and parsed.notes == ()
    assert parsed.state.keys() == state_of(head).keys()
    assert all(torch.equal(parsed.state[name], tensor) for name, tensor in state_of(head).items())

    reading = system.read(package, facts())
    assert reading.errors == []
    assert set(reading.used) == set(package.tensors)
    extra = {name: tensor for name, tensor in reading.weights.items() if name not in parsed.state}
    assert all(torch.equal(reading.weights[name], tensor) for name, tensor in parsed.state.items())
    assert not any(tensor.any() for tensor in extra.values()), "biases that the system has beside ours are zero"


@pytest.mark.parametrize(("kind", "family"), PAIRS)
@pytest.mark.parametrize("through", ["AutoConfig", "LlamaConfig"])
def test_transformers_reads_the_rope_and_the_sizes_that_the_head_has(kind, family, through, tmp_path):
    head = random_head(FAMILIES[family])
    package = FORMATS[kind].write(head.config, state_of(head), torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(package.config))
    read = getattr(transformers, through).from_pretrained(tmp_path)
    want, rope = head.config.llama, read.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"]) == (want.rope_scaling.kind, want.rope_theta)
    if want.rope_scaling.kind != "default":
        frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](read, torch.device("cpu"))
        found = rope_frequencies(FORMATS[kind].read(package, None).settings["llama"])
        # two float32 evaluations of the same formula
        torch.testing.assert_close(found, frequencies, rtol=1e-6, atol=0)
    assert (read.head_dim, read.num_key_value_heads, read.num_hidden_layers) == (
        want.head_dim,
        want.num_kv_heads,
        want.num_layers,
    )
    assert (read.dtype, read.tie_word_embeddings, read.max_position_embeddings) == (torch.bfloat16, False, CONTEXT)
    assert package.config["torch_dtype"] == "bfloat16" and package.tensors["fc.weight"].dtype == torch.bfloat16


def test_the_three_directories_differ_where_the_systems_do():
    head = random_head(FAMILIES["qwen2"])
    eagle, vllm, sglang = (FORMATS[name].write(head.config, state_of(head), torch.float32) for name in FORMATS)
    assert eagle.config == vllm.config and eagle.tensors.keys() == vllm.tensors.keys()
    assert eagle.config["architectures"] == ["LlamaForCausalLM"] and eagle.config["bias"] is False
    assert eagle.config["qkv_bias"] is True and "attention_bias" not in eagle.config
    assert sglang.config["architectures"] == ["LlamaForCausalLMEagle"] and sglang.config["attention_bias"] is True
    zeros = sglang.tensors.keys() - eagle.tensors.keys()
    assert zeros == {"fc.bias", "layers.0.self_attn.o_proj.bias"}
    assert not any(sglang.tensors[name].any() for name in zeros)
    assert "embed_tokens.weight" not in eagle.tensors and "lm_head.weight" not in eagle.tensors


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("change", "fc_bias", "reason"),
    [
        ({}, True, "fc_bias: found True.*vLLM drops it silently.*[Tt]rain"),
        ({"qk_norm": True}, False, "qk_norm.*Train it again: heads trained from now on have none"),
        ({"o_bias": True, "qkv_bias": True}, False, "o_bias"),
        ({"mlp_bias": True}, False, "mlp_bias"),
        ({"num_heads": 5, "num_kv_heads": 5}, False, "num_heads: found 5, expected a divisor of hidden_size 12"),
        ({"sliding_window": 8}, False, "sliding_window"),
    ],
)
def test_a_head_that_no_system_holds_is_refused_with_the_reason(kind, change, fc_bias, reason):
    head = random_head(llama(**change), fc_bias=fc_bias)
    if kind == "eagle" and "num_heads" in change:
        reason = "head_dim"  # its narrower rule comes first
    with pytest.raises(InputError, match=reason):
        FORMATS[kind].write(head.config, state_of(head), torch.float32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 8}, "head_dim: found 8, expected hidden_size / num_heads = 4.*--format vllm"),
        ({"rope_scaling": LLAMA3}, "rope_scaling: found llama3.*--format vllm"),
        ({"rope_scaling": LINEAR}, "linear by 4 on base 5000, .*base 10000.*--format vllm"),
    ],
)
def test_what_safeailabs_code_computes_otherwise_is_refused_there_and_written_elsewhere(change, reason):
    head = random_head(llama(**change))
    with pytest.raises(InputError, match=reason):
        FORMATS["eagle"].write(head.config, state_of(head), torch.float32)
    for kind in ("vllm", "sglang"):
        FORMATS[kind].write(head.config, state_of(head), torch.float32)


def test_the_serving_commands_survive_a_shell():
    model, directory = "org/target", "my heads/it's one"
    words = {kind: shlex.split(FORMATS[kind].serve(Served(model, directory, 4))) for kind in FORMATS}
    assert words["vllm"][:3] == ["vllm", "serve", model]
    assert json.loads(words["vllm"][words["vllm"].index("--speculative-config") + 1]) == {
        "method": "eagle", "model": directory, "num_speculative_tokens": 4,
    }  # fmt: skip
    flags = dict(zip(words["sglang"][3::2], words["sglang"][4::2], strict=True))
    assert flags == {
        "--model-path": model,
        "--speculative-algorithm": "EAGLE",
        "--speculative-draft-model-path": directory,
        "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "5",
    }
    assert words["eagle"][-1] == directory and model in words["eagle"]


def test_state_and_config_of_two_heads_are_a_defect():
    head = random_head(FAMILIES["qwen2"])
    with pytest.raises(AssertionError):
        FORMATS["vllm"].write(EagleConfig(FAMILIES["llama"]), state_of(head), torch.float32)

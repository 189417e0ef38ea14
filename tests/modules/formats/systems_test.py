"""The commands that serve a head, as each system's own command line takes them."""

from __future__ import annotations

import json
import shlex

import pytest

from draftsmith.modules.drafters.block.net import BlockConfig, layers_like
from draftsmith.modules.drafters.eagle3 import Eagle3Config
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Served, TargetFacts
from draftsmith.modules.llama_config import LlamaConfig

MODEL, HEAD = "org/target", "my heads/one"
SGLANG = ["python", "-m", "sglang.launch_server", "--model-path", MODEL, "--speculative-algorithm"]
CHAIN = ["--speculative-num-steps", "4", "--speculative-eagle-topk", "1"]
COUNT = ["--speculative-num-draft-tokens", "5"]
WEBUI = ["python", "-m", "eagle.application.webui", "--base-model-path", MODEL, "--ea-model-path", HEAD]
COMMANDS = {
    ("eagle", "eagle"): WEBUI,
    ("eagle", "eagle3"): [*WEBUI, "--no-eagle3"],
    ("sglang", "eagle"): [*SGLANG, "EAGLE", "--speculative-draft-model-path", HEAD, *CHAIN, *COUNT],
    ("sglang", "eagle3"): [*SGLANG, "EAGLE3", "--speculative-draft-model-path", HEAD, *CHAIN, *COUNT],
    ("sglang", "dflash2"): [*SGLANG, "DFLASH", "--speculative-draft-model-path", HEAD, *COUNT],
    ("sglang", "dspark"): [
        *SGLANG, "DSPARK", "--speculative-draft-model-path", HEAD, "--speculative-dspark-block-size", "4",
    ],
    ("llamacpp", "dflash2"): [
        "llama-server", "-m", MODEL, "-md", HEAD, "--spec-type", "draft-dflash", "--spec-draft-n-max", "4",
    ],
    ("llamacpp", "eagle3"): [
        "llama-server", "-m", MODEL, "-md", HEAD, "--spec-type", "draft-eagle3", "--spec-draft-n-max", "4",
    ],
    ("mtp", "mtp"): [
        "vllm", "serve", HEAD, "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 4}',
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), COMMANDS)
def test_the_command_survives_a_shell(name, kind):
    assert shlex.split(formats()[name, kind].serve(Served(MODEL, HEAD, 4))) == COMMANDS[name, kind]


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kind in formats() if name in ("vllm", "speculators")]
)
def test_vllm_takes_the_kind_of_a_head_for_its_method(name, kind):
    *words, options = shlex.split(formats()[name, kind].serve(Served(MODEL, HEAD, 4)))
    assert words == ["vllm", "serve", MODEL, "--speculative-config"]
    method = {"dflash2": "dflash"}.get(kind, kind)  # one speculator, which goes by the class
    assert json.loads(options) == {"method": method, "model": HEAD, "num_speculative_tokens": 4}


def test_vllm_is_told_to_use_the_confidences_of_a_head():
    """By default it verifies whole drafts (config/speculative.py, enable_adaptive_verification)."""
    for confidence in (True, False):
        command = formats()["vllm", "dspark"].serve(Served(MODEL, HEAD, 4, confidence=confidence))
        assert json.loads(shlex.split(command)[-1]).get("enable_adaptive_verification", False) is confidence


def test_sglangs_command_has_the_window_of_an_eagle3_head():
    """It counts the tokens before the one that attends. Block drafters have theirs in the files."""
    served = Served(MODEL, HEAD, 4, window=256)
    assert "--speculative-draft-window-size 255" in formats()["sglang", "eagle3"].serve(served)
    for name, kind in (("sglang", "dflash"), ("vllm", "eagle3")):
        assert "window" not in formats()[name, kind].serve(served)


def test_vllm_reads_states_of_other_families_by_the_transformers_backend():
    eagle3, eagle = formats()["vllm", "eagle3"], formats()["vllm", "eagle"]
    assert "--model-impl transformers --spec" in eagle3.serve(Served(MODEL, HEAD, 4, family="gemma3"))
    for format, family in ((eagle3, "qwen3_5"), (eagle3, ""), (eagle, "gemma3")):
        assert "--model-impl" not in format.serve(Served(MODEL, HEAD, 4, family=family))


LAYERS = {"lfm2": ["conv", "full_attention"], "gemma3": ["sliding_attention", "full_attention"]}
# Family, kind -> the systems that draft for it. Run or read in each; PROBE: llama.cpp aborts with Gemma 3.
SERVING = {
    ("qwen3_5", "eagle3"): {"vllm", "sglang", "speculators", "llamacpp"},
    ("gemma4", "eagle3"): {"vllm", "sglang", "speculators", "llamacpp"},
    ("gemma4", "dspark"): {"vllm", "speculators", "llamacpp"},
    ("gemma3", "eagle3"): {"vllm", "sglang", "speculators"},
    ("lfm2", "eagle3"): {"llamacpp"},
    ("lfm2", "dspark"): {"sglang", "llamacpp"},
    ("granitemoehybrid", "eagle3"): set(),
    ("minimax_m2", "dspark"): {"vllm", "speculators", "llamacpp"},
    ("llama", "eagle3"): {"eagle", "vllm", "sglang", "speculators", "llamacpp"},
    ("granitemoehybrid", "eagle"): {"eagle", "vllm", "sglang"},
}


@pytest.mark.parametrize(("family", "kind"), SERVING)
def test_a_target_is_taken_by_the_systems_that_give_states_of_its_layers(family, kind):
    text = {"model_type": f"{family}_text", "layer_types": LAYERS.get(family), "mamba_d_state": 8}
    names = [name for name, known in formats() if known == kind and formats()[name, known].writes]
    for raw in ({"model_type": family, "text_config": text}, text):
        served = {name for name in names if not formats()[name, kind].unserved(TargetFacts(raw))}
        assert served == SERVING[family, kind]


def test_servers_take_a_multimodal_model_by_its_own_class_and_llama_cpp_by_its_text():
    """SGLang's InternVLChatModel and Mistral3ForConditionalGeneration have none of the calls for states."""
    for wrapper, text, served in (
        ("mistral3", "mistral", {"vllm", "speculators", "llamacpp"}),
        ("internvl", "qwen3", {"vllm", "speculators", "llamacpp"}),
        ("kimi_k25", "kimi_k2", {"vllm", "speculators", "sglang"}),
        ("lfm2_vl", "lfm2", {"llamacpp"}),
    ):
        target = TargetFacts(
            {"model_type": wrapper, "text_config": {"model_type": text, "layer_types": LAYERS.get(text)}}
        )
        names = [name for name, kind in formats() if kind == "eagle3" and formats()[name, kind].writes]
        assert {name for name in names if not formats()[name, "eagle3"].unserved(target)} == served
    backend = "--model-impl transformers --spec"
    commands = [
        formats()["vllm", "eagle3"].serve(Served(MODEL, HEAD, 4, family=name)) for name in ("internvl", "mistral3")
    ]
    assert [backend in command for command in commands] == [True, False]


def test_a_factor_on_logits_is_refused_of_heads_whose_states_cannot_hold_it():
    target = TargetFacts({"model_type": "granite"}, scale=0.125)
    assert "leaves out the factor 0.125" in formats()["vllm", "eagle"].unserved(target)
    assert not any(formats()["vllm", kind].unserved(target) for kind in ("dspark", "eagle3"))


def test_llama_cpp_gives_the_state_after_the_last_layer_of_few_targets():
    """src/models: t_h_nextn for EAGLE-3, normed for most, and t_layer_inp[n_layer] for blocks."""
    layers = LlamaConfig(60, 8, 16, 1, 2, 1, 4, 64)
    configs = {
        "eagle3": Eagle3Config(layers, (2, 3, 6), 60),
        "dspark": BlockConfig(layers_like(layers, 1), (2, 6), 4, 3, markov_rank=2),
    }
    given = {"gpt_oss": ["eagle3"], "nemotron_h": ["dspark"], "mimo_v2_flash": [*configs], "qwen3_5": []}
    for family, kinds in given.items():
        target = TargetFacts({"model_type": family, "vocab_size": 60, "hidden_size": 8, "num_hidden_layers": 6})
        for kind, config in configs.items():
            refused = [one[0] for one in formats()["llamacpp", kind].refused(config, target)]
            assert refused == ([] if kind in kinds else ["layers"]), (family, kind)

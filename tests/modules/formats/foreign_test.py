"""Detection of a directory's format by the names of its tensors. Published heads: published_heads_test.py."""

from __future__ import annotations

import pytest
import torch

from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import VERSIONS, NotReadHere, Package, TargetFacts
from draftsmith.modules.formats.foreign import builders, detect, head_kind, named_format
from draftsmith.modules.formats.systems import FORMATS
from draftsmith.modules.types import InputError

H, V, INTER, AUX = 64, 512, 176, 3
LLAMA = {
    "model_type": "llama", "hidden_size": H, "vocab_size": V, "num_attention_heads": 4, "rope_theta": 10000.0,
    "num_key_value_heads": 2, "intermediate_size": INTER, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
TARGET = TargetFacts({"num_hidden_layers": 12, "hidden_size": H, "vocab_size": V}, torch.ones(V, H), torch.ones(V, H))
EAGLE_1 = LLAMA | {"architectures": ["LlamaForCausalLM"], "bias": False, "rope_scaling": None}


def package(config: dict, shapes: dict) -> Package:
    """A directory of tensors of ones; the draft vocabulary is the target's first tokens."""
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    if "d2t" in shapes:
        drafted = shapes["d2t"][0]
        tensors |= {"d2t": torch.zeros(drafted).long(), "t2d": torch.arange(V) < drafted}
    return Package(config, tensors)


def layer(prefix: str, width: int = H, norms: tuple[str, ...] = ("post_attention_layernorm",), **more) -> dict:
    """One decoder layer of four heads and two key/value heads whose attention reads `width` values."""
    shapes = {f"{prefix}.{norm}.weight": (H,) for norm in norms}
    for name, rows in (("q", H), ("k", H // 2), ("v", H // 2)):
        shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, width)
    shapes[f"{prefix}.self_attn.o_proj.weight"] = (H, H)
    for name, shape in (("gate", (INTER, H)), ("up", (INTER, H)), ("down", (H, INTER))):
        shapes[f"{prefix}.mlp.{name}_proj.weight"] = shape
    return shapes | {f"{prefix}.{name}": shape for name, shape in more.items()}


PLAIN = ("input_layernorm", "post_attention_layernorm")
EAGLE = {"fc.weight": (H, 2 * H)} | layer("layers.0")
QKV_BIAS = {f"layers.0.self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", H), ("k", H // 2), ("v", H // 2))}
WIDE = EAGLE | {
    "layers.0.self_attn.q_proj.weight": (2 * H, H),
    "layers.0.self_attn.k_proj.weight": (H, H),
    "layers.0.self_attn.v_proj.weight": (H, H),
    "layers.0.self_attn.o_proj.weight": (H, 2 * H),
}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def specdec(blocks: int, stored: int | None = None) -> dict:
    """stored: blocks in the file; safetensors keeps the one shared block once."""
    shapes: dict[str, tuple[int, ...]] = {}
    for j in range(blocks if stored is None else stored):
        shapes |= {f"model.{j}.linear.weight": (H, H), f"model.{j}.linear.bias": (H,)}
    return shapes | {f"model.{blocks}.weight": (2, H), f"model.{blocks}.bias": (2,)}


LAST = {"norm.weight": (H,)}
SPECDEC = {"hidden_size": H, "num_layers": 3}

# Name of the case -> (format, config.json, tensors).
READ = {
    "SafeAILab, Qwen2": ("eagle", EAGLE_1 | {"qkv_bias": True}, EAGLE | QKV_BIAS),
    "vLLM's class by its name": ("vllm", EAGLE_1 | {"architectures": ["EagleLlamaForCausalLM"]}, EAGLE),
    "vLLM, heads wider than the model": ("vllm", EAGLE_1 | {"head_dim": 32}, WIDE),
    "vLLM, Llama-3 rope": ("vllm", EAGLE_1 | {"rope_scaling": LLAMA3_ROPE}, EAGLE),
    "SGLang": ("sglang", EAGLE_1 | {"architectures": ["LlamaForCausalLMEagle"]}, EAGLE | {"fc.bias": (H,)}),
    "SafeAILab under SGLang's class name": ("eagle", EAGLE_1 | {"architectures": ["LlamaForCausalLMEagle"]}, EAGLE),
    "SafeAILab's bias under SGLang's class name": (
        "eagle", EAGLE_1 | {"architectures": ["LlamaForCausalLMEagle"], "bias": True}, EAGLE | {"fc.bias": (H,)},
    ),
    "Automodel's, with a last norm": ("eagle", EAGLE_1 | {"architectures": ["LlamaEagleDraftModel"]}, EAGLE | LAST),
    "SpecDec_pp, safetensors": ("specdec_pp", SPECDEC, specdec(3, stored=1)),
}  # fmt: skip

EAGLE_3 = (
    {"fc.weight": (H, AUX * H), "norm.weight": (H,), "lm_head.weight": (128, H), "d2t": (128,), "t2d": (V,)}
    | layer("midlayer", 2 * H, ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
)  # fmt: skip
AS_LAYERS = {name.replace("midlayer", "layers.0"): shape for name, shape in EAGLE_3.items()}
FULL_VOCABULARY = {name: shape for name, shape in AS_LAYERS.items() if name not in ("d2t", "t2d")}
MEDUSA_2 = {f"{i}.0.linear.{part}": shape for i in range(4) for part, shape in (("weight", (H, H)), ("bias", (H,)))}
MEDUSA_1 = MEDUSA_2 | {f"{i}.1.weight": (V, H) for i in range(4)}
MEDUSA = {"medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
LM = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)} | {
    name: shape for i in range(2) for name, shape in layer(f"model.layers.{i}", norms=PLAIN).items()
}
HYDRA_EAGLE = {"fc.weight": (H, 2 * H), "fc.bias": (H,), "input_embed_fn.weight": (V, H), "lm_head.weight": (V, H)}
DFLASH = {"fc.weight": (H, 5 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)} | {
    name: shape
    for i in range(2)
    for name, shape in layer(
        f"layers.{i}", norms=PLAIN, **{"self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,)}
    ).items()
}


def of(name: str) -> dict:
    return LLAMA | {"architectures": [name]}


def speculators(kind: str) -> dict:
    return {"speculators_model_type": kind, "speculators_config": {"algorithm": kind}, "draft_vocab_size": 128}


# What the message says, config.json, tensors.
REFUSED = [
    ("one of draftsmith's own heads", {"kind": "eagle", "schema_version": 1, "head": {"fc_bias": False}}, EAGLE),
    ("a causal language model, LlamaForCausalLM", of("LlamaForCausalLM"), LM),
    ("a causal language model, DeepseekV3ForCausalLM", of("DeepseekV3ForCausalLM"),
        LM | {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (4, H)},
    ),
    ("a causal language model", {}, {"wte.weight": (V, H), "h.0.attn.c_attn.weight": (H, 3 * H)}),
    ("quantized weights", EAGLE_1, {"fc.qweight": (8, H), "fc.scales": (1, H)}),
    ("no head that is known (layers.0.mlp", EAGLE_1, layer("layers.0")),  # EAGLE-1 that lost its fc
    ("no head that is known (model.0.linear.bias", SPECDEC, specdec(1) | {"model.1.weight": (1, H)}),
    ("no head that is known (none)", {}, {}),
]  # fmt: skip
NOWHERE = "none of vLLM 0.33.0, SGLang 0.5.23, llama.cpp (llama-cpp-python 0.3.36)"
LAGUNA = {"layers.0.self_attn.g_proj.weight": (4, H)}
# What it is called, by whom it is trained and served, config.json, tensors.
NOT_READ = [
    ("an XPress head, Qwen3XPressModel", "speculators 0.9.0", "vLLM 0.33.0", of("Qwen3XPressModel"), DFLASH),
    ("an XPress head", "speculators 0.9.0", "vLLM 0.33.0",
        speculators("xpress"), DFLASH | {"refiner_head.readout.weight": (V, 8)},
    ),
    ("a P-EAGLE head", "speculators 0.9.0, SpecForge 0.2.0, Automodel 0.7.0", "vLLM 0.33.0", speculators("peagle"),
        AS_LAYERS | {"mask_hidden": (1, 1, AUX * H)},
    ),
    ("a P-EAGLE head, PEagleDraftModel", "SpecForge 0.2.0", "vLLM 0.33.0", of("PEagleDraftModel"), AS_LAYERS),
    ("a DSpine head, DSpineDraftModel", "SpecForge main 9aafadf", NOWHERE, of("DSpineDraftModel"), DFLASH),
    ("a DSpine head", "SpecForge main 9aafadf", NOWHERE, {}, DFLASH | {"transfer_codes": (V, 8)}),
    ("a Domino head", "SpecForge 0.2.0, ModelOpt 0.47.0, Automodel 0.7.0", "SGLang 0.5.23", of("DFlashDraftModel"),
        DFLASH | {"prefix_gru.weight_ih_l0": (12, H)},
    ),
    ("a head with latent attention (MLA)", "TorchSpec 6f21829, Automodel 0.7.0", "vLLM 0.33.0, SGLang 0.5.23", {},
        EAGLE_3 | {"midlayer.self_attn.kv_a_proj_with_mqa.weight": (4, H)},
    ),
    ("a LiLiCorr head, LiLiCorrDraftModel", "ModelOpt main 33d8c76", "vLLM 0.33.0, SGLang 0.5.23",
        of("LiLiCorrDraftModel"), DFLASH | {"lilicorr.token_proj.weight": (H, H)},
    ),
    ("an EAGLE-4 head", "", "eagle-harness 0.1.3", of("LlamaForCausalLMEagle4"), AS_LAYERS),
    ("a head of speculators of kind mtp", "speculators 0.9.0", NOWHERE, speculators("mtp"), AS_LAYERS),
    ("a head of speculators of kind None", "speculators 0.9.0", NOWHERE, {"speculators_config": {}}, AS_LAYERS),
    ("a block drafter whose layers are not Qwen3's", "", "vLLM 0.33.0, SGLang 0.5.23",
        of("DFlashLagunaForCausalLM"), DFLASH | LAGUNA,
    ),
    ("a block drafter whose layers are not Qwen3's", "", "vLLM 0.33.0", of("Gemma4DSparkModel"), DFLASH),
    ("a block drafter whose layers are not Qwen3's", "", NOWHERE,
        of("DFlash2DraftModel"), DFLASH | {"selector_hidden.weight": (H, H)},
    ),
    ("Medusa heads", "ModelOpt 0.47.0", NOWHERE, MEDUSA, MEDUSA_1),
    ("Medusa heads", "", NOWHERE, {}, LM | {f"medusa_heads.{name}": shape for name, shape in MEDUSA_2.items()}),
    ("Hydra heads", "Hydra 3f39fbd", NOWHERE, {}, {"hydra_mlp.0.0.linear.weight": (H, 2 * H)}),
    ("Hydra heads", "", NOWHERE, {"hydra_head_arch": "eagle-attn"}, HYDRA_EAGLE | layer("attn", norms=PLAIN)),
    ("a class that is not read, Qwen2ForCausalLMEagle", "", "SGLang 0.5.23",
        of("Qwen2ForCausalLMEagle"), EAGLE | QKV_BIAS,
    ),
]  # fmt: skip


# Format, config.json, tensors.
EAGLE_3_READ = [
    ("sglang", {}, {n: s for n, s in EAGLE_3.items() if n not in ("fc.weight", "d2t", "t2d")}),  # that lost its class
    ("sglang", {"norm_before_fc": True}, EAGLE_3),  # SafeAILab's have no such norm
    ("sglang", EAGLE_1, EAGLE_3 | {"input_norm.weight": (AUX * H,)}),
    ("sglang", of("LlamaForCausalLMEagle3") | {"fc_norm": True}, FULL_VOCABULARY),
    ("sglang", {}, AS_LAYERS | {"aux_norm_low.weight": (H,)}),
    ("vllm", of("Eagle3LlamaForCausalLM"), AS_LAYERS),
    ("vllm", of("LlamaForCausalLMEagle3") | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, EAGLE_3),
    ("vllm", of("LlamaForCausalLMEagle3") | {"norm_before_residual": True}, EAGLE_3),
]

SELECTOR = {"candidate_selector.predecessor_codebook": (V, 4)}
BLOCKS_READ = [
    ("vllm", "dflash", {}, DFLASH),
    ("vllm", "dflash", of("Qwen3DFlashDraftModel"), {f"model.{n}": s for n, s in DFLASH.items()}),
    ("vllm", "dspark", of("Qwen3DSparkModel"), DFLASH | {"markov_head.markov_w1.weight": (V, 4)}),
    ("vllm", "dspark", of("Qwen3DSparkModel") | {"markov_rank": 4}, DFLASH),  # that lost its Markov head
    ("speculators", "dflash", speculators("dflash"), DFLASH),
    ("speculators", "dflash2", speculators("dflash2"), DFLASH | SELECTOR),
    ("vllm", "dflash2", of("DFlash2DraftModel"), DFLASH),  # that lost its selector
    ("modelopt", "dspark", of("DFlashDraftModel"), DFLASH | {"markov_w1.weight": (V, 4)}),
]


RECOGNIZED = [
    *((name, None, config, shapes) for name, config, shapes in READ.values()),
    *((name, "eagle3", config, shapes) for name, config, shapes in EAGLE_3_READ),
    *BLOCKS_READ,
]


@pytest.mark.parametrize(("name", "kind", "config", "shapes"), RECOGNIZED)
def test_the_system_that_reads_a_directory_best_is_recognized(name, kind, config, shapes):
    directory = package(config, shapes)
    format = detect(directory, TARGET)
    assert format is formats()[name, kind or format.kind]
    if kind:
        assert all(named_format(other, directory).kind == kind for other in ("vllm", "sglang", "speculators"))


def test_an_export_is_recognized_by_its_record():
    """SGLang reads the same head in it, which would else decide."""
    directory = package(LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 128}, EAGLE_3)
    assert detect(directory, TARGET).name == "sglang"
    for name in ("vllm", "sglang"):
        assert detect(Package(directory.config, {}, {"format": name, "kind": "eagle3"})) is formats()[name, "eagle3"]


@pytest.mark.parametrize(("said", "config", "shapes"), REFUSED)
def test_a_known_layout_that_is_not_read_is_refused_by_its_name(said, config, shapes):
    with pytest.raises(InputError) as error:
        head_kind(package(config, shapes))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("said", "trained", "served", "config", "shapes"), NOT_READ)
def test_a_head_of_others_is_named_with_its_trainers_and_servers(said, trained, served, config, shapes):
    with pytest.raises(NotReadHere) as error:
        head_kind(package(config, shapes))
    text = str(error.value)
    assert f"found {said}" in text.replace("an EAGLE-1 head of ", "") and text.endswith(f"served by {served}.")
    assert trained in text and "\n" not in text


def test_systems_that_build_a_class_are_named_with_their_versions():
    assert {format.system for format in FORMATS} <= VERSIONS.keys()
    block = {
        "vLLM 0.33.0, SGLang 0.5.23": of("DFlash2DraftModel"),
        "vLLM 0.33.0, speculators 0.9.0": speculators("dflash2"),
    }
    for systems, config in block.items():
        assert builders(package(config, DFLASH), "dflash2") == systems


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLMEagle", [None], 7])
def test_architectures_of_another_form_are_ignored(architectures):
    format = detect(package(EAGLE_1 | {"architectures": architectures}, EAGLE), TARGET)
    assert (format.name, format.kind) == ("eagle", "eagle")

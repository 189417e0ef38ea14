"""Quantized checkpoints: their weights are computed exactly, and numbers without their scales stop every engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from gguf_models import write_gguf_model
from quantized_files import (
    COMPUTED,
    MODELOPT,
    change_config,
    fp4,
    fp8_tensor,
    gptq,
    groups,
    int8,
    nvfp4,
    packed_int4,
    quantize,
)
from safetensors.torch import load_file, save_file
from tiny_configs import random_model, tiny_config
from transformers import AutoModelForCausalLM
from worlds import tiny_llama_dir

from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.layerwise import read_layerwise
from draftsmith.modules.pretrained.models import load_lm, load_outer, load_transformers
from draftsmith.modules.pretrained.quantized import Quantized
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError

IDS = torch.tensor([[5, 9, 40, 7]])
READERS = (
    load_lm,
    lambda path: load_lm(path, loader="hf"),
    lambda path: load_transformers(Checkpoint(path), "auto"),
    lambda path: read_layerwise(Checkpoint(path), [1, 2], lambda *_: None),
    lambda path: write_gguf_model(Path("x"), Checkpoint(path)),
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("plain"), hidden=64, tie_word_embeddings=False)


@pytest.fixture
def pair(plain, tmp_path) -> tuple[Path, Path]:
    """A directory to quantize, and one for the weights that it stands for."""
    first, second = (Path(shutil.copytree(plain, tmp_path / name)) for name in ("quantized", "twin"))
    return first, second


@pytest.mark.parametrize("method", COMPUTED)
def test_every_engine_computes_the_weights_that_files_stand_for(method, pair):
    directory, twin = pair
    quantize(directory, twin, *COMPUTED[method])
    assert Checkpoint(directory).quantized.fp4 == ("FP4" in method)
    lean, hf, expected = load_lm(str(directory)), load_lm(str(directory), loader="hf"), load_lm(str(twin))
    assert isinstance(lean, LlamaLM)
    # Products of numbers and scales are rounded to float32 twice.
    for name, weight in expected.model.state_dict().items():
        torch.testing.assert_close(lean.model.state_dict()[name], weight, rtol=2e-6, atol=1e-7)
    logits = [lm.lm_head(lm.features(IDS))[0] for lm in (expected, lean, hf)]
    logits.append(read_layerwise(Checkpoint(directory), IDS[0].tolist(), lambda *_: None))
    for one in logits[1:]:
        torch.testing.assert_close(one, logits[0], rtol=0, atol=logits[0].std().item() * 1e-4)
    # Another model than the twin, whatever engine reads it.
    assert lean.info.identity == hf.info.identity
    assert lean.info.identity["weights"] != expected.info.identity["weights"]
    weight = load_transformers(Checkpoint(directory), torch.bfloat16).state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(weight, lean.model.state_dict()["layers.0.mlp.up_proj.weight"].bfloat16())


def test_gpt_oss_is_what_transformers_makes_of_it(tmp_path):
    config = tiny_config("gpt_oss")
    config.intermediate_size = 64
    random_model(config).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16)).to(torch.uint8)
        state[f"{name}_scales"] = torch.randint(120, 126, (experts, rows, columns // 32)).to(torch.uint8)
    save_file({name: own.bfloat16() if own.is_floating_point() else own for name, own in state.items()},
              tmp_path / "model.safetensors", {"format": "pt"})  # fmt: skip
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    ours = load_lm(str(tmp_path)).model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], own.float()) for name, own in theirs.items())


@pytest.mark.parametrize("kind", ["ModelOpt FP8", "ModelOpt NVFP4"])
@pytest.mark.parametrize("file", ["hf_quant_config.json", "config.json"])
def test_modelopts_own_file_and_its_old_settings_name_the_method(kind, file, pair):
    directory, twin = pair
    settings, writer = COMPUTED[kind]
    settings = {"quant_algo": settings["quant_algo"]}
    quantize(directory, twin, settings if file == "config.json" else None, writer)
    if file != "config.json":
        (directory / file).write_text(json.dumps({"quantization": settings}))
    expected = load_lm(str(twin)).features(IDS)
    torch.testing.assert_close(load_lm(str(directory)).features(IDS), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ends", ["lm_head", "embed_tokens"])
def test_a_quantized_embedding_is_read_with_its_scale(pair, ends):
    directory, twin = pair
    quantize(directory, twin, *COMPUTED["ModelOpt FP8"], ends)
    quantized, expected = (load_outer(str(path)) for path in pair)
    states = torch.randn(3, 64)
    assert torch.equal(quantized.lm_head(states), expected.lm_head(states))
    assert torch.equal(quantized.embed(IDS), expected.embed(IDS))
    assert quantized.info.identity["lm_head"] == load_lm(str(directory), loader="hf").info.identity["lm_head"]
    assert (quantized.info.identity["lm_head"] == expected.info.identity["lm_head"]) == (ends == "embed_tokens")


def without(writer, *ends: str):
    def write(rows, columns):
        parts, exact = writer(rows, columns)
        return {name: tensor for name, tensor in parts.items() if name not in ends}, exact

    return write


def adding(writer, **extra: torch.Tensor):
    def write(rows, columns):
        parts, exact = writer(rows, columns)
        return parts | {name: tensor.clone() for name, tensor in extra.items()}, exact

    return write


def float4(rows: int, columns: int):
    stored, exact = fp4(rows, columns)
    return {"weight": stored.view(torch.float4_e2m1fn_x2)}, exact


def bare_integers(rows: int, columns: int):
    return {"weight": torch.zeros(rows, columns, dtype=torch.int16)}, torch.zeros(rows, columns)


FP8 = MODELOPT | {"quant_algo": "FP8"}
# Files that no engine may read: their settings, weights, and words of the message.
REFUSED = {
    "FP8 without a scale": (FP8, without(fp8_tensor, "weight_scale"), "down_proj.weight in F8_E4M3"),
    "FP8 of an unknown method": ({"quant_method": "x9"}, fp8_tensor, "x9: an unknown method"),
    "FP8 of no method": (None, fp8_tensor, "a method that config.json does not name"),
    "integers of no method": (None, bare_integers, "proj.weight in I16"),
    "FP4 numbers": (FP8, float4, "proj.weight in F4"),
    "NVFP4 without the scale of its scales": (
        MODELOPT | {"quant_algo": "NVFP4"}, without(nvfp4, "weight_scale_2"), "proj.weight in U8"
    ),
    "scales of inputs by channel (ModelOpt W4A16_AWQ)": (
        FP8, adding(fp8_tensor, pre_quant_scale=torch.ones(64)), "proj.pre_quant_scale in F32"
    ),
    "numbers in another order (`weight_g_idx`)": (
        groups(num_bits=4), adding(COMPUTED["compressed-tensors W4A16"][1], weight_g_idx=torch.arange(64)),
        "proj.weight_g_idx in I64"
    ),
    "scales of plain weights": (
        FP8, lambda rows, columns: ({"weight": torch.ones(rows, columns), "weight_scale": torch.ones(1)},
                                    torch.ones(rows, columns)), "proj.weight_scale in F32",
    ),
    "AWQ for other kernels": ({"quant_method": "awq", "version": "gemv"}, COMPUTED["AWQ"][1], "version gemv"),
    "GPTQ for Marlin": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, gptq, "checkpoint_format marlin"),
    "rotated weights": (
        groups(num_bits=8) | {"transform_config": {"config_groups": {"u": {}}}}, int8, "transform_config"
    ),
    "settings alone": (FP8, lambda rows, columns: ({"weight": torch.ones(rows, columns)}, torch.ones(rows, columns)),
                       "files without quantized weights"),
}  # fmt: skip


MODELOPTS = [name for name, (settings, *_) in REFUSED.items() if settings and "quant_algo" in settings]


@pytest.mark.parametrize(("files", "file"), [(name, "config.json") for name in REFUSED]
                         + [(name, "hf_quant_config.json") for name in MODELOPTS])  # fmt: skip
def test_numbers_without_their_scales_stop_every_engine_before_weights_are_read(files, file, pair, monkeypatch):
    settings, writer, words = REFUSED[files]
    directory, twin = pair
    quantize(directory, twin, settings if file == "config.json" else None, writer)
    if file != "config.json":
        (directory / file).write_text(json.dumps({"quantization": settings}))
    # vLLM's states of such a target are learned from.
    assert torch.equal(load_outer(str(directory)).embed(IDS), load_outer(str(twin)).embed(IDS))
    monkeypatch.setattr(Checkpoint, "state", None)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", None)
    for read in READERS:
        with pytest.raises(
            InputError,
            match=rf"quantized \(.*{words}.*vLLM run it: data responses --engine openai, train --server URL",
        ) as error:
            read(str(directory))
        assert "\n" not in str(error.value)


def replacing(writer, **changes):
    """A writer whose tensors of these names are changed by functions."""

    def write(rows, columns):
        parts, exact = writer(rows, columns)
        return parts | {name: change(parts[name]) for name, change in changes.items()}, exact

    return write


W4A16, W4A16_ZEROS = (groups(num_bits=4, type="int", symmetric=symmetric) for symmetric in (True, False))
NVFP4 = COMPUTED["compressed-tensors NVFP4"]


@pytest.mark.parametrize(("settings", "writer", "words"), [
    (W4A16_ZEROS, without(packed_int4, "weight_zero_point"), "weight_packed without weight_zero_point"),
    (W4A16_ZEROS, replacing(packed_int4, weight_zero_point=lambda zero: zero.to(torch.int8)), "weight_zero_point"),
    (NVFP4[0], without(NVFP4[1], "weight_global_scale"), "weight_packed in U8"),
    (NVFP4[0], replacing(NVFP4[1], weight_scale=lambda scale: scale.view(torch.uint8)), "weight_global_scale in F32"),
    (COMPUTED["GPTQ"][0], without(gptq, "g_idx"), "qweight without g_idx"),
    (COMPUTED["GPTQ"][0] | {"format": "marlin"}, gptq, "format marlin"),
])  # fmt: skip
def test_parts_that_are_missing_or_of_another_type_are_not_guessed(settings, writer, words, pair):
    quantize(*pair, settings, writer)
    for engine in ("lean", "hf"):
        with pytest.raises(InputError, match=f"quantized .*{words}"):
            load_lm(str(pair[0]), loader=engine)


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_the_second_format_of_gptq_stores_whole_zero_points(key, pair):
    directory, twin = pair
    settings = {"quant_method": "gptq", "bits": 4, key: "gptq_v2"}
    # Zero points of the first format are one less.
    quantize(directory, twin, settings, gptq)
    plain = load_lm(str(directory)).model.state_dict()["layers.0.mlp.up_proj.weight"]
    change_config(directory, quantization_config=settings | {key: "gptq"})
    first = load_lm(str(directory)).model.state_dict()["layers.0.mlp.up_proj.weight"]
    scales = load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.scales"]
    groups_of = load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.g_idx"]
    torch.testing.assert_close(plain - first, scales.float()[groups_of].T)


def test_biases_of_zeros_that_autogptq_adds_are_dropped(pair):
    directory, twin = pair
    settings, writer = COMPUTED["GPTQ"]

    def with_bias(rows, columns):
        parts, exact = writer(rows, columns)
        return parts | {"bias": torch.zeros(rows).half()}, exact

    quantize(directory, twin, settings, with_bias)
    found, expected = (load_lm(str(path)).features(IDS) for path in (directory, twin))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    state = load_file(directory / "model.safetensors")
    state["model.layers.0.self_attn.o_proj.bias"][1] = 1
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"o_proj\.bias"):
        load_lm(str(directory))


def test_modelopts_scales_of_blocks_have_four_dimensions():
    """vLLM 0.33, modelopt.py: [N / 128, 1, K / 128, 1], of which the last blocks may be cut."""
    numbers, scale = torch.randn(192, 256).to(torch.float8_e4m3fn), torch.rand(2, 1, 2, 1)
    found = Quantized("modelopt FP8_PB_WO").compute("weight", {"weight": numbers, "weight_scale": scale})
    expected = numbers.double() * scale[:, 0, :, 0].double().repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_blocks_of_unknown_sizes_are_not_guessed(pair):
    """2 scales of 64 rows may be of 48 and 16."""
    directory, twin = pair
    settings, writer = COMPUTED["FP8 in blocks"]
    quantize(directory, twin, settings | {"weight_block_size": None}, writer)
    for engine in ("lean", "hf"):
        with pytest.raises(InputError, match=r"scales of \[2, .\] for a weight of \[64, .*\], in blocks of None"):
            load_lm(str(directory), loader=engine)


def test_a_method_of_transformers_alone_runs_there(pair):
    directory, twin = pair
    quantize(directory, twin, {}, int8)
    for method, settings in (("torchao", {"quant_method": "torchao"}), ("bitsandbytes", {"load_in_4bit": True})):
        change_config(directory, quantization_config=settings)
        with pytest.raises(InputError, match=rf"quantized .{method}.*--loader hf"):
            load_lm(str(directory), loader="lean")
        with pytest.raises(InputError, match=rf"which needs a package .*{method}"):
            load_lm(str(directory))
    change_config(directory, quantization_config={"quant_method": "nvfp4"})
    with pytest.raises(InputError, match=r"quantized .nvfp4: .*not supported yet.*train --server URL"):
        load_lm(str(directory))


CACHES = {
    "config.json": {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {},
                                            "kv_cache_scheme": {"num_bits": 8}}},
    "hf_quant_config.json": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
}  # fmt: skip


@pytest.mark.parametrize("file", CACHES)
def test_a_quantized_cache_leaves_weights_as_they_are(file, pair):
    """ModelOpt and compressed-tensors write its scales beside the weights."""
    directory, twin = pair
    raw = json.loads((directory / file).read_text()) if (directory / file).exists() else {}
    (directory / file).write_text(json.dumps(raw | CACHES[file]))
    state = load_file(directory / "model.safetensors")
    state |= {name.replace("weight", f"{name[-13]}_scale"): torch.tensor(0.5) for name in state
              if name.endswith(("k_proj.weight", "v_proj.weight"))}  # fmt: skip
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    expected = load_lm(str(twin)).features(IDS)
    assert isinstance(load_lm(str(directory)), LlamaLM)
    for engine in ("lean", "hf"):
        torch.testing.assert_close(load_lm(str(directory), loader=engine).features(IDS), expected, rtol=0, atol=1e-4)

"""Checkpoints with another MTP module: the target is as before to the bit, and no tensor of the old module is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import COMPUTED, change_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_configs import VOCAB, random_model, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.files import whole_directory
from draftsmith.modules.pretrained.stitch import mtp_state, ships_mtp, stitch
from draftsmith.modules.types import InputError

SHORT = {"mimo_v2_flash": {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}}
# Files' names of the tensors around the layer, in the order of enorm, hnorm, eh_proj, norm; the layer's prefix; and
# the count's field: of released checkpoints, as vLLM 0.33 and SGLang 0.5.23 read them.
QWEN = (
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "mtp.layers.0.",
    "mtp_num_hidden_layers",
)
NEXTN = tuple(f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
MIMO = tuple(f"model.mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm"))
FAMILIES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "qwen3_next": (*QWEN[:2], "num_nextn_predict_layers"),
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "glm4_moe": (NEXTN, "model.layers.4.", "num_nextn_predict_layers"),
    "deepseek_v3": (NEXTN, "model.layers.4.", "num_nextn_predict_layers"),
    "mimo_v2_flash": (MIMO, "model.mtp.layers.0.", ""),
}


def target_of(model_type: str) -> Any:
    return random_model(tiny_config(model_type, **SHORT.get(model_type, {})))


def random_state(model: Any, seed: int) -> dict[str, Tensor]:
    """An MTP module by our names: random tensors like those of one of the target's layers."""
    kinds = [layer for layer in model.model.layers if hasattr(layer, "self_attn")]
    # MiMo's is the only one that is dense and reads a window.
    layer = kinds[1] if model.config.model_type == "mimo_v2_flash" else kinds[-1]
    shapes = {f"layer.{name}": tensor.shape for name, tensor in layer.state_dict().items()}
    width = model.config.hidden_size
    shapes |= {f"{name}.weight": torch.Size([width]) for name in ("enorm", "hnorm", "norm")}
    shapes["eh_proj.weight"] = torch.Size([width, 2 * width])
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def by_file(model_type: str, state: dict[str, Tensor], fused: bool = False) -> dict[str, Tensor]:
    """The same module as a released checkpoint has it."""
    outer, layer, _ = FAMILIES[model_type]
    tensors = {}
    for name, tensor in state.items():
        if name.startswith("layer."):
            name = layer + name.removeprefix("layer.")
            if model_type == "mimo_v2_flash":
                name = name.replace("post_attention_layernorm", "pre_mlp_layernorm")
                name = name.replace("sinks", "attention_sink_bias")
        else:
            kind = name.removesuffix(".weight")
            name = f"{outer[('enorm', 'hnorm', 'eh_proj', 'norm').index(kind)]}.weight"
        if ".experts." not in name or fused:
            tensors[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            stem = f"{name.rpartition('.')[0]}.{number}"
            if name.endswith("gate_up_proj"):
                half = len(expert) // 2
                tensors[f"{stem}.gate_proj.weight"] = expert[:half].clone()
                tensors[f"{stem}.up_proj.weight"] = expert[half:].clone()
            else:
                tensors[f"{stem}.down_proj.weight"] = expert.clone()
    return tensors


def write_shards(directory: Path, shards: dict[str, dict[str, Tensor]]) -> None:
    for name, tensors in shards.items():
        save_file(tensors, directory / name, {"format": "pt"})
    names = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def checkpoint(directory: Path, model: Any, own: dict[str, Tensor] | None = None) -> None:
    """Write a target in three shards: one without MTP tensors, one mixed, one of MTP tensors only."""
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    if own is not None:
        tensors = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        whole, half = list(tensors.items()), len(tensors) // 2
        modules = list(own.items())
        mixed = dict(whole[half:] + modules[: len(own) // 2])
        write_shards(
            directory,
            {"model-00001-of-00003.safetensors": dict(whole[:half]), "model-00002-of-00003.safetensors": mixed,
             "mtp.safetensors": dict(modules[len(own) // 2 :])},
        )  # fmt: skip


def stitched(source: Path, output: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stitch, check the index against the files, and return all tensors of the copy."""
    with whole_directory(output) as partial:
        stitch(Checkpoint(source), partial, state)
    weight_map = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for file in output.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert not found.keys() & set(opened.keys())
            found |= dict.fromkeys(opened.keys(), file.name)
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert found == weight_map
    return tensors


def logits(directory: Path) -> Tensor:
    # Sums of grouped experts depend on where in memory weights lie.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None] % VOCAB, use_cache=False).logits


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_another_module_takes_the_old_ones_place(model_type, tmp_path):
    model = target_of(model_type)
    old, new = random_state(model, 1), random_state(model, 2)
    source, output = tmp_path / "target", tmp_path / "copy"
    fused = model_type == "qwen3_5_moe_text"  # as in Qwen3.6-35B-A3B
    checkpoint(source, model, by_file(model_type, old, fused))
    assert_equal(mtp_state(Checkpoint(source)), old)
    before = {file.name: file.read_bytes() for file in source.iterdir()}

    tensors = stitched(source, output, new)
    assert_equal(mtp_state(Checkpoint(output)), new)
    kept = {name: tensor for shard in source.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    kept = {name: tensor for name, tensor in kept.items() if name not in by_file(model_type, old, fused)}
    assert_equal(tensors, kept | by_file(model_type, new, fused))
    assert torch.equal(logits(output), logits(source))
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before

    links = {file.name for file in output.iterdir() if file.is_symlink()}
    assert links == {"model-00001-of-00003.safetensors", "tokenizer.json", "generation_config.json"}
    config, count = json.loads((output / "config.json").read_text()), FAMILIES[model_type][2]
    assert not count or config.pop(count) == 1
    wanted = json.loads((source / "config.json").read_text())
    assert config == {name: value for name, value in wanted.items() if name != count}
    # A copy of the copy is the same: its module stands in a shard of its own.
    assert_equal(stitched(output, tmp_path / "again", old), kept | by_file(model_type, old, fused))


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_transformers_loads_the_module_of_a_copy(model_type, tmp_path, monkeypatch):
    model = target_of(model_type)
    state = random_state(model, 1)
    checkpoint(tmp_path / "target", model)
    # A target without a module: its files stand as they are, and experts are written as its layers have them.
    stitched(tmp_path / "target", tmp_path / "copy", state)
    # Its pattern has the layers' numbers of the released models.
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.4\..*"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32)
    module = MtpModel.from_pretrained(loaded).layers[0]
    names = {"norm.weight": "post_norm.weight"}
    theirs = {names.get(name, name.replace("layer.", "mtp_block.", 1)): tensor for name, tensor in state.items()}
    assert_equal(dict(module.state_dict()), theirs)


def test_a_module_in_a_file_that_no_index_names_is_read_as_vllm_reads_it(tmp_path):
    model = target_of("qwen3_5_text")
    checkpoint(tmp_path, model)
    assert not ships_mtp(Checkpoint(tmp_path)) and not mtp_state(Checkpoint(tmp_path))
    state = random_state(model, 1)
    save_file(by_file("qwen3_5_text", state), tmp_path / "mtp.safetensors", {"format": "pt"})
    assert ships_mtp(Checkpoint(tmp_path))
    assert_equal(mtp_state(Checkpoint(tmp_path)), state)


@pytest.mark.parametrize("own", [False, True])
def test_a_single_file_becomes_shards(own, tmp_path):
    model = target_of("qwen3_5_text")
    source, state = tmp_path / "target", random_state(model, 2)
    checkpoint(source, model)
    if own:
        tensors = load_file(source / "model.safetensors") | by_file("qwen3_5_text", random_state(model, 1))
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
    stitched(source, tmp_path / "copy", state)
    assert (tmp_path / "copy" / "model-00001-of-00001.safetensors").is_symlink() != own
    assert not (tmp_path / "copy" / "model.safetensors").exists()  # transformers would read no other file
    assert_equal(mtp_state(Checkpoint(tmp_path / "copy")), state)
    assert torch.equal(logits(tmp_path / "copy"), logits(source))


def test_the_count_of_a_model_that_sees_stands_with_its_text(tmp_path):
    model = target_of("qwen3_5_text")
    checkpoint(tmp_path / "target", model)
    text = json.loads((tmp_path / "target" / "config.json").read_text())
    raw = {"model_type": "qwen3_5", "text_config": text}
    (tmp_path / "target" / "config.json").write_text(json.dumps(raw))
    stitched(tmp_path / "target", tmp_path / "copy", random_state(model, 1))
    written = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert written == {**raw, "text_config": {**text, "mtp_num_hidden_layers": 1}}


def test_a_snapshot_of_the_hub_and_the_copies_of_the_targets_tables(tmp_path):
    model = target_of("deepseek_v3")
    written, snapshot, blobs = (
        tmp_path / "written",
        tmp_path / "repo" / "snapshots" / "abc",
        tmp_path / "repo" / "blobs",
    )
    copies = {
        "model.layers.4.embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
        "model.layers.4.shared_head.head.weight": model.lm_head.weight.detach().clone(),
    }
    checkpoint(written, model, by_file("deepseek_v3", random_state(model, 1)) | copies)
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(written.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    tensors = stitched(snapshot, tmp_path / "elsewhere" / "copy", random_state(model, 2))
    shard = tmp_path / "elsewhere" / "copy" / "model-00001-of-00003.safetensors"
    assert shard.readlink().parent == blobs
    assert_equal({name: tensors[name] for name in copies}, copies)
    assert torch.equal(logits(tmp_path / "elsewhere" / "copy"), logits(snapshot))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_a_quantized_module_is_read_with_its_scales(model_type, tmp_path):
    """DeepSeek publishes its module in FP8 alone. Another one would be taken for FP8, too."""
    model = target_of(model_type)
    plain = by_file(model_type, random_state(model, 1))
    stored, (settings, write) = dict(plain), COMPUTED["FP8 in blocks"]
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        parts, exact = write(*stored.pop(name).shape)
        plain[name] = exact.float()
        stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    for directory, own in ((tmp_path / "plain", plain), (tmp_path / "fp8", stored)):
        checkpoint(directory, model, own)
    change_config(tmp_path / "fp8", quantization_config=settings)
    state = mtp_state(Checkpoint(tmp_path / "fp8"))
    assert_equal(state, mtp_state(Checkpoint(tmp_path / "plain")))
    with pytest.raises(InputError, match="its settings would hold for the module, too"):
        stitch(Checkpoint(tmp_path / "fp8"), tmp_path / "copy", state)


def test_what_cannot_be_stitched_is_refused(tmp_path):
    checkpoint(tmp_path / "target", random_model(tiny_config("llama")))
    with pytest.raises(InputError, match="a target of type llama"):
        mtp_state(Checkpoint(tmp_path / "target"))
    config = tmp_path / "target" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(InputError, match="quantized"):
        stitch(Checkpoint(tmp_path / "target"), tmp_path / "copy", {})

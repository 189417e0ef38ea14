"""`draftsmith import`: heads in other systems' files, written here by hand, come out as heads that compute the same."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from worlds import tiny_llama_dir

from draftsmith.launch.cli import main
from draftsmith.launch.export.import_head import run
from draftsmith.launch.export.settings import ImportConfig
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.drafters.eagle3 import Eagle3Config, Eagle3Head, layer_like
from draftsmith.modules.pretrained.card import write_measured
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import head_config, load_head, save_head
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

WIDTH = 32


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("target")))


def lean(path: str) -> Any:
    return load_lm(path, loader="lean")


def original(target: str, dtype: torch.dtype = torch.float32, fc_bias: bool = False) -> EagleHead:
    """A random head of the target's sizes, its values such that `dtype` holds them."""
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(lean(target).config, fc_bias=fc_bias))
    for weight in head.parameters():
        weight.data.add_(0.2 * torch.randn_like(weight))
        weight.data = weight.data.to(dtype).float()
    return head.eval().requires_grad_(False)


def eagle_fields(target: str, **changes: object) -> dict:
    """config.json as SafeAILab's own samples have it (eagle/train/vicuna_7B_config.json)."""
    raw = Checkpoint(target).config
    copied = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
              "max_position_embeddings", "rms_norm_eps")  # fmt: skip
    fields = {key: raw[key] for key in copied} | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    fields |= {"num_hidden_layers": 1, "hidden_act": "silu", "rope_theta": 10000.0, "rope_scaling": None, "bias": False}
    return fields | changes


def write(directory: Path, config: dict, state: dict[str, Tensor], file: str, **metadata: str) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(state, directory / file, metadata=metadata)
    else:
        torch.save(state, directory / file, _use_new_zipfile_serialization="legacy" not in file)
    return str(directory)


def embedding(target: str) -> Tensor:
    return lean(target).embeddings.clone()


def stored(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


# Whose -> (file, dtype, fc bias, what of the config is theirs, tensors beside the head's).
EAGLE = {
    "eagle, stock trainer": ("pytorch_model.bin", torch.float16, True, {"bias": True}, ()),
    "eagle, published": ("pytorch_model.bin", torch.bfloat16, False, {}, ("embed_tokens.weight",)),
    "vllm": ("model.safetensors", torch.bfloat16, False, {"architectures": ["EagleLlamaForCausalLM"]}, ()),
    "sglang": ("model.safetensors", torch.float32, True, {"architectures": ["LlamaForCausalLMEagle"]}, ()),
}


@pytest.mark.parametrize("case", EAGLE)
def test_an_eagle_head_is_imported_bit_for_bit(tmp_path, target, capsys, case):
    file, dtype, fc_bias, fields, extra = EAGLE[case]
    head = original(target, dtype, fc_bias)
    weights = {name: tensor.to(dtype) for name, tensor in head.named_parameters()}
    state = weights | {name: embedding(target).to(dtype) for name in extra}
    directory = write(tmp_path / "theirs", eagle_fields(target, **fields), state, file)
    output = tmp_path / "ours"
    assert main(["import", directory, "--output", str(output), "--target", target]) == 0
    found = stored(output)
    assert found.keys() == weights.keys()
    assert all(found[name].dtype == dtype and torch.equal(found[name], weights[name]) for name in weights)

    lm = load_lm(target)
    ids = torch.arange(2, 22)[None]
    inputs = lm.embed(ids[:, 1:]), lm.features(ids)[:, :-1]
    assert torch.equal(load_head(output, lm, "eagle").unroll(*inputs, 1)[0], head.unroll(*inputs, 1)[0])

    manifest = json.loads((output / "manifest.json").read_text())
    producer = case.split(",")[0]
    assert manifest["imported"]["producer"] == producer and manifest["imported"]["path"] == directory
    assert manifest["imported"]["sha256"] == {file: hashlib.sha256(Path(directory, file).read_bytes()).hexdigest()}
    assert manifest["imported"]["target"] == target and manifest["target"] == lm.info.identity
    assert manifest["models"] == {"target": lm.info.identity, **Checkpoint(target).tokenizer_identity}
    said = capsys.readouterr().out
    assert f"draftsmith check {directory} --format {producer} --target {target}" in said
    assert all(note in said for note in manifest["imported"]["notes"])
    assert any("embed_tokens" in note for note in manifest["imported"]["notes"]) == bool(extra)


# SafeAILab's own layout: bias of fc, fields of the config, size of the weights.
SAFEAILAB = {
    "published": (False, {}, 1.0),
    "large logits": (True, {"bias": True}, 2.0),
    "its bias under SGLang's class name": (True, {"architectures": ["LlamaForCausalLMEagle"], "bias": True}, 1.0),
}


@pytest.mark.parametrize("case", SAFEAILAB)
def test_the_check_that_an_import_proposes_finds_no_difference(tmp_path, target, capsys, case):
    fc_bias, fields, scale = SAFEAILAB[case]
    state = {name: scale * weight for name, weight in original(target, fc_bias=fc_bias).named_parameters()}
    theirs = write(tmp_path / "theirs", eagle_fields(target, **fields), state, "pytorch_model.bin")
    assert main(["import", theirs, "--output", str(tmp_path / "ours"), "--target", target]) == 0
    shown = capsys.readouterr().out
    assert "eagle head in the format of SafeAILab/EAGLE" in " ".join(shown.split())
    proposed = " ".join(shown.partition("Next:")[2].split()).split("draftsmith ")[1]
    assert main(proposed.split()) in (0, 3), capsys.readouterr().out  # other readings of random weights draft as well


def test_a_directory_that_its_system_cannot_compute_is_told_and_another_proposed(tmp_path, target, capsys):
    fields = eagle_fields(target, architectures=["LlamaForCausalLMEagle"], rope_parameters={"rope_theta": 20000.0})
    del fields["rope_theta"]
    theirs = write(tmp_path / "theirs", fields, dict(original(target).named_parameters()), "model.safetensors")
    assert main(["import", theirs, "--output", str(tmp_path / "ours"), "--target", target]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "vLLM would not compute this head from the directory as it is: architectures" in said
    proposed = said.partition("Next: draftsmith ")[2].split(" draftsmith ")[0]
    assert main(proposed.replace(" DIR", f" {tmp_path / 'export'}").split()) == 0


def specdec_weights(blocks: int) -> dict[str, Tensor]:
    """Two classes of a head whose blocks are one object: its last layer is `model.{blocks}`."""
    torch.manual_seed(1)
    block = {"linear.weight": 0.2 * torch.randn(WIDTH, WIDTH), "linear.bias": 0.2 * torch.randn(WIDTH)}
    state = {f"model.{j}.{name}": tensor.clone() for j in range(blocks) for name, tensor in block.items()}
    return state | {f"model.{blocks}.weight": torch.randn(2, WIDTH), f"model.{blocks}.bias": torch.randn(2)}


def test_a_head_without_its_model_is_imported_and_bound_to_none(tmp_path, target, capsys):
    theirs = write(tmp_path / "theirs", eagle_fields(target), dict(original(target).named_parameters()), "head.bin")
    output = run(ImportConfig(theirs, tmp_path / "ours"))
    assert head_config(output)["target"] is None
    assert "no --target was given" in capsys.readouterr().out
    load_head(output, load_lm(target), "eagle")


def refusal(*args: object, **settings: object) -> str:
    with pytest.raises(InputError) as error:
        run(ImportConfig(*args, **settings))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_head_of_another_width_than_its_model_is_refused(tmp_path, target):
    theirs = write(tmp_path / "theirs", eagle_fields(target), dict(original(target).named_parameters()), "head.bin")
    other = str(tiny_llama_dir(tmp_path / "other", hidden=64))
    assert "64" in refusal(theirs, tmp_path / "ours", target=other)
    theirs = write(tmp_path / "specdec", {"hidden_size": WIDTH, "num_layers": 1}, specdec_weights(1), "head.bin")
    assert "64" in refusal(theirs, tmp_path / "ours", head=other)
    assert not (tmp_path / "ours").exists()


def test_nothing_is_overwritten(tmp_path, target):
    theirs = write(tmp_path / "theirs", eagle_fields(target), dict(original(target).named_parameters()), "head.bin")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "notes").touch()
    assert "which exists" in refusal(theirs, tmp_path / "ours")
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["notes"]


def test_a_flag_of_the_other_kind_of_head_is_refused(tmp_path, target):
    eagle = write(tmp_path / "eagle", eagle_fields(target), dict(original(target).named_parameters()), "head.bin")
    acceptance = write(tmp_path / "specdec", {"hidden_size": WIDTH, "num_layers": 1}, specdec_weights(1), "head.bin")
    assert "--target" in refusal(eagle, tmp_path / "ours", head=target)
    assert "w_rej" in refusal(eagle, tmp_path / "ours", w_rej=6.0)
    assert "--head" in refusal(acceptance, tmp_path / "ours", target=target)
    assert "w_rej" in refusal(acceptance, tmp_path / "ours", w_rej=0.0)


def test_weights_that_are_not_the_heads_are_refused(tmp_path, target):
    state, name = dict(original(target).named_parameters()), "layers.0.mlp.up_proj.weight"
    undefined = state[name].clone()
    undefined[0, 0] = torch.nan
    for number, tensor in enumerate((None, undefined)):
        weights = {**state, name: tensor} if tensor is not None else {n: t for n, t in state.items() if n != name}
        theirs = write(tmp_path / f"theirs{number}", eagle_fields(target), weights, "pytorch_model.bin")
        assert name in refusal(theirs, tmp_path / "ours", target=target)
    assert not (tmp_path / "ours").exists()


def test_a_whole_model_and_a_head_of_our_own_are_told_what_they_are(tmp_path, target, capsys):
    assert main(["import", target, "--output", str(tmp_path / "ours")]) == 2
    assert "a causal language model" in capsys.readouterr().err
    own = save_head(tmp_path / "own", original(target), {}, "card")
    assert main(["import", str(own), "--output", str(tmp_path / "ours")]) == 2
    assert "It needs no import" in capsys.readouterr().err


def test_a_head_of_another_system_is_no_draft_model(tmp_path, target, capsys):
    """Not read, or to be imported first; a draft model passes."""
    state = {"fc.weight": torch.zeros(WIDTH, 2 * WIDTH)}
    gone = str(tmp_path / "gone.jsonl")
    bench = ["eval", "bench", "--target", target, "--methods", "spec", "--data", gone, "--output", f"{gone}-out"]
    for name, words in (
        ("Qwen3XPressModel", "an XPress head"),
        ("LlamaForCausalLM", "Import it first: draftsmith import"),
    ):
        theirs = write(tmp_path / name, {"architectures": [name]}, state, "model.safetensors")
        assert main([*bench, "--head", theirs]) == 2
        assert words in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert main([*bench, "--head", target]) == 2 and "gone.jsonl" in capsys.readouterr().err


def test_a_format_that_is_named_is_not_guessed(tmp_path, target):
    fields = eagle_fields(target, architectures=["SomeoneElsesEagle"])
    theirs = write(tmp_path / "theirs", fields, dict(original(target).named_parameters()), "head.bin")
    assert "SomeoneElsesEagle" in refusal(theirs, tmp_path / "ours", target=target)
    assert run(ImportConfig(theirs, tmp_path / "ours", target=target, format="eagle")).exists()


def test_facts_are_the_models_own_tables_on_either_engine(target):
    from draftsmith.eval.check.states import facts_of

    lean, hf = (facts_of(load_lm(target, loader=engine)) for engine in ("lean", "hf"))
    assert lean.raw == hf.raw == json.loads(Path(target, "config.json").read_text())
    for name in ("embed_tokens", "lm_head"):
        assert torch.equal(getattr(lean, name), getattr(hf, name))
    assert not torch.equal(lean.embed_tokens, lean.lm_head)


def tuned(target: str, path: Path) -> str:
    """The target with other weights, and the same tokenizer."""
    shutil.copytree(target, path)
    state = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in stored(path).items()}
    save_file(state, path / "model.safetensors")
    return str(path)


def own_eagle3(target: str, path: Path) -> Path:
    """An EAGLE-3 head of ours with half of the vocabulary, whose lm_head is the target's."""
    lm = load_lm(target)
    torch.manual_seed(1)
    half = lm.info.vocab_size // 2
    head = Eagle3Head(Eagle3Config(layer_like(lm.config), (0, 1, 2), half))
    tokens = torch.arange(0, 2 * half, 2)
    head.use_draft_vocabulary(tokens, lm.lm_head_weight())
    models = {"target": lm.info.identity, **Checkpoint(target).tokenizer_identity}
    manifest = {"target": lm.info.identity, "models": models, "tied_to_target": ["lm_head.weight"], "step": 7}
    manifest |= {"config": {"target": target}, "metrics": {"tau": 2.5}}
    return save_head(path, head, manifest, "card")


def test_a_head_of_ours_is_bound_to_a_fine_tune(tmp_path, target, capsys):
    head, new = own_eagle3(target, tmp_path / "head"), tuned(target, tmp_path / "tuned")
    measured = {"settings": {}, "methods": [], "prompts": {}, "hardware": {}}
    write_measured(head, measured)
    with pytest.raises(InputError, match="trained for another model"):
        load_head(head, load_lm(new))
    assert main(["import", str(head), "--target", new, "--output", str(tmp_path / "bound")]) == 0
    assert "what was measured there does not hold" in capsys.readouterr().out
    before, after = stored(head), stored(tmp_path / "bound")
    differing = {name for name in before if not torch.equal(before[name], after[name])}
    # Its output layer is the new target's own, at the rows of its tokens; no other weight has moved.
    assert differing == {"lm_head.weight"}
    assert torch.equal(after["lm_head.weight"], load_lm(new).lm_head_weight()[before["d2t"]])
    load_head(tmp_path / "bound", load_lm(new))
    manifest = json.loads((tmp_path / "bound" / "manifest.json").read_text())
    assert "metrics" not in manifest and manifest["config"]["target"] == new and manifest["step"] == 7
    assert manifest["bound"] == {"from": target, "identity": load_lm(target).info.identity}
    card = (tmp_path / "bound" / "README.md").read_text()
    assert f"trained for `{target}`, and not for this one" in card and "Not measured yet" in card
    assert not (tmp_path / "bound" / "measured.json").exists()
    with pytest.raises(InputError, match="trained for another model"):
        load_head(tmp_path / "bound", load_lm(target))


def test_a_head_that_is_bound_twice_says_what_it_was_trained_for(tmp_path, target):
    head, tuned_once = own_eagle3(target, tmp_path / "head"), tuned(target, tmp_path / "tuned")
    again = tuned(target, tmp_path / "again")
    for number, (source, to) in enumerate(((head, tuned_once), ("0", again), ("1", target))):
        path = str(source if number == 0 else tmp_path / source)
        assert main(["import", path, "--target", to, "--output", str(tmp_path / str(number))]) == 0
    manifests = [json.loads((tmp_path / str(number) / "manifest.json").read_text()) for number in range(3)]
    assert manifests[0]["bound"] == manifests[1]["bound"] == {"from": target, "identity": load_lm(target).info.identity}
    assert "bound" not in manifests[2]


def test_an_export_is_bound_to_a_fine_tune_and_a_diagnosis_of_it_refuses_that_target(tmp_path, target, capsys):
    head, new = own_eagle3(target, tmp_path / "head"), tuned(target, tmp_path / "tuned")
    there = ["export", "--head", str(head), "--format", "vllm", "--output", str(tmp_path / "there")]
    assert main(there) == 0
    capsys.readouterr()
    assert main(["import", str(tmp_path / "there"), "--target", new, "--output", str(tmp_path / "bound")]) == 0
    assert "what was measured there does not hold" in capsys.readouterr().out
    load_head(tmp_path / "bound", load_lm(new))
    words = ["--data", "none", "--target", new, "--write", str(tmp_path / "repaired")]
    assert main(["diagnose", str(tmp_path / "there"), *words]) == 2
    assert "another model than the head was trained for (lm_head, weights differ)" in capsys.readouterr().err


def test_a_head_of_the_target_is_copied(tmp_path, target, capsys):
    head = own_eagle3(target, tmp_path / "head")
    capsys.readouterr()
    assert main(["import", str(head), "--target", target, "--output", str(tmp_path / "copy")]) == 0
    assert f"it is a head of {target} already, and copied as it is" in capsys.readouterr().out
    for name in ("model.safetensors", "config.json", "manifest.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (head / name).read_bytes()


def test_a_head_is_not_bound_to_other_sizes_or_other_tokens(tmp_path, target):
    head = str(own_eagle3(target, tmp_path / "head"))
    wide = str(tiny_llama_dir(tmp_path / "wide", hidden=64))
    assert "of width 32, expected width 64" in refusal(head, tmp_path / "out", target=wide)
    new = Path(tuned(target, tmp_path / "tuned"))
    tokenizer = json.loads((new / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second, *_ = [token for token in ids if len(token) == 1]
    ids[first], ids[second] = ids[second], ids[first]
    (new / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert f"2 tokens of {target} have another id" in refusal(head, tmp_path / "out", target=str(new))
    there = str(tmp_path / "there")
    assert main(["export", "--head", head, "--format", "vllm", "--output", there]) == 0
    assert "another tokenizer than the head was trained with" in refusal(there, tmp_path / "out", target=str(new))
    # One layer less: the last layer's number is that of the state after the final norm there.
    short = Path(tuned(target, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (short / "config.json").write_text(json.dumps(config))
    weights = load_file(short / "model.safetensors")
    kept = {name: own for name, own in weights.items() if f".layers.{config['num_hidden_layers']}." not in name}
    save_file(kept, short / "model.safetensors", {"format": "pt"})
    assert "layers of" in refusal(head, tmp_path / "out", target=str(short))
    assert not (tmp_path / "out").exists()

"""Load models: engines, dtypes, end tokens, identity, and weights that do not fit the config."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chats import CHATML, HARMONY, chat_model
from gguf_models import write_gguf_model
from quantized_files import change_config
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from worlds import tiny_llama_dir, tiny_tokenizer

from draftsmith.data.engines.own import generate_all, pad_right
from draftsmith.launch.cli import main
from draftsmith.modules.pretrained import parity
from draftsmith.modules.pretrained.checkpoint import Checkpoint, check_same_tokenizer, load_tokenizer
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.pretrained.models import dtype_of, load_lm, load_outer
from draftsmith.modules.targets.hf import HFLM
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.targets.shape import llama_config
from draftsmith.modules.types import InputError, SamplingParams

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def directory(pristine, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def change_state(directory: Path, change) -> None:
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors", {"format": "pt"})


def gpt2(directory: Path) -> Path:
    """Sizes under other names (n_embd), learned positions, Conv1D weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=40, initializer_range=0.3, eos_token_id=3,
        bos_token_id=None,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def test_engines_and_what_they_run(pristine, tmp_path):
    lean, hf = load_lm(str(pristine)), load_lm(str(pristine), loader="hf")
    assert isinstance(lean, LlamaLM) and isinstance(hf, HFLM) and lean.info == hf.info
    assert lean.info.eos_ids == (load_tokenizer(str(pristine)).eos_token_id,)
    assert not any(p.requires_grad for lm in (lean, hf) for p in lm.model.parameters())
    with pytest.raises(InputError, match="path: found embedded:nothing"):
        resolve_model("embedded:nothing")
    with pytest.raises(InputError, match="model_type: found gpt2"):
        load_lm(str(gpt2(tmp_path)), loader="lean")
    with pytest.raises(InputError, match="loader: found vllm"):
        load_lm(str(pristine), loader="vllm")


def test_a_rope_type_that_only_transformers_knows_falls_back_to_it(directory):
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
    change_config(directory, rope_parameters=dynamic)
    assert isinstance(load_lm(str(directory)), HFLM)
    with pytest.raises(InputError, match="rope_type: found dynamic"):
        load_lm(str(directory), loader="lean")


@pytest.mark.parametrize(
    ("fields", "engine"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, LlamaLM),  # as model cards say, beside rope_parameters
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 32}}, LlamaLM),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, LlamaLM),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "rope_theta": 777.0}, "rope_theta": 555.0}, LlamaLM),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 555.0}, LlamaLM),
        ({"rope_parameters": None, "rope_theta": 555.0}, LlamaLM),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 555.0}, LlamaLM),
        ({"partial_rotary_factor": 0.5}, HFLM),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 555.0}}}, HFLM),
    ],
)  # fmt: skip
def test_rotary_settings_in_every_spelling_are_those_of_transformers(directory, fields, engine):
    change_config(directory, **fields)
    lm, ids = load_lm(str(directory)), torch.arange(5, 101)[None]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert isinstance(lm, engine)
    with torch.no_grad():
        # Logits of order 10 through two float32 layers; without the scaling they are off by 1 and more.
        torch.testing.assert_close(lm.lm_head(lm.features(ids)), oracle(ids).logits, atol=1e-4, rtol=0)


def test_a_field_that_only_transformers_reads_leaves_the_model_to_it(tmp_path, capsys):
    """transformers takes a Mistral with layer_types for a Ministral, whose layers may have no window."""
    directory = tiny_llama_dir(tmp_path / "model", family="mistral", sliding_window=5)
    assert isinstance(load_lm(str(directory)), LlamaLM)
    change_config(directory, layer_types=["full_attention"] * 2)
    lm, ids = load_lm(str(directory)), torch.arange(5, 30)[None]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(lm.lm_head(lm.features(ids)), oracle(ids, use_cache=False).logits)
    assert isinstance(lm, HFLM) and "runs on transformers (loader: lean, whose logits differ" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"rms_eps": 1e-2}, {"rope_theta": 9000.0}, {"qkv_bias": True}])
def test_a_lean_engine_that_computes_something_else_is_not_used(directory, tmp_path, monkeypatch, capsys, changes):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert isinstance(load_lm(str(directory)), LlamaLM)
    misread = lambda raw: dataclasses.replace(llama_config(raw), **changes)  # noqa: E731
    monkeypatch.setattr(parity, "llama_config", misread)
    assert isinstance(load_lm(str(directory)), LlamaLM), "this config.json was compared before"
    change_config(directory, use_cache=False, rms_norm_eps=2e-6)
    assert isinstance(load_lm(str(directory)), HFLM) and "loader: lean, whose" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"loader: found lean, whose .*Load it with --loader hf"):
        load_lm(str(directory), loader="lean")


def identity(directory: Path, **how: Any) -> dict[str, str]:
    return load_lm(str(directory), **how).info.identity


def test_identity_is_the_weights_and_the_config_not_how_they_were_loaded(pristine, directory, tmp_path):
    own = identity(pristine)
    assert identity(directory) == identity(directory, dtype="bfloat16") == own
    change_config(directory, transformers_version="5.0.0", use_cache=False)
    assert identity(directory) == own
    change_config(directory, rms_norm_eps=1e-3)
    other = identity(directory)
    assert other["config"] != own["config"] and other["lm_head"] == own["lm_head"]
    retrained = identity(tiny_llama_dir(tmp_path / "other", seed=1))
    assert retrained["config"] == own["config"] and retrained["lm_head"] != own["lm_head"]


@pytest.mark.parametrize("engine", ["lean", "hf"])
def test_one_changed_value_is_another_model(pristine, directory, engine):
    change_state(directory, lambda state: state[DOWN].index_put_((torch.tensor(3), torch.tensor(5)), torch.tensor(9.0)))
    before, after = identity(pristine, loader=engine), identity(directory, loader=engine)
    assert [key for key in before if before[key] != after[key]] == ["weights"]


@pytest.mark.parametrize("tied", [False, True])
def test_shards_types_engines_and_prefixes_are_the_same_model(tmp_path, tied):
    # bfloat16 weights, so that each type holds them exactly.
    first = tiny_llama_dir(tmp_path / "first", tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
    model.save_pretrained(first)
    expected = identity(first)
    assert identity(first, loader="hf") == identity(first, dtype="float16") == expected
    for name, dtype, size in (("float32", torch.float32, "5GB"), ("shards", torch.bfloat16, "20KB")):
        other = Path(shutil.copytree(first, tmp_path / name))
        (other / "model.safetensors").unlink()
        model.to(dtype).save_pretrained(other, max_shard_size=size)
        assert identity(other) == identity(other, loader="hf") == expected, name
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    state = {name.removeprefix("model."): tensor for name, tensor in load_file(first / "model.safetensors").items()}
    if tied:  # some files have it, some have not
        state["lm_head.weight"] = state["embed_tokens.weight"].clone()
    save_file(state, first / "model.safetensors", {"format": "pt"})
    assert identity(first) == expected


def test_what_decides_token_ids_is_in_the_encoding(pristine, directory):
    before = Checkpoint(pristine).tokenizer_identity
    file = directory / "tokenizer.json"
    original = json.loads(file.read_text())

    def now(**changes: Any) -> dict[str, str]:
        file.write_text(json.dumps({**original, **changes}))
        return Checkpoint(directory).tokenizer_identity

    assert now(truncation={"max_length": 5, "strategy": "LongestFirst", "direction": "Right", "stride": 0}) == before
    merges = original["model"]["merges"]
    as_text = [" ".join(pair) if isinstance(pair, list) else pair for pair in merges]
    assert now(model={**original["model"], "merges": as_text, "ignore_merges": False}) == before
    fewer = now(model={**original["model"], "merges": merges[:-1]})
    lower = now(normalizer={"type": "Lowercase"})
    for other in (fewer, lower):
        assert other["tokenizer"] == before["tokenizer"] and other["encoding"] != before["encoding"]
    assert fewer["encoding"] != lower["encoding"]


def test_a_large_tensor_is_sampled_from_its_first_value_to_its_last(directory):
    """A tensor of 64 GB, whose file has holes: its values would take a minute to read."""
    head = {"x": {"dtype": "BF16", "shape": [2**19, 2**16], "data_offsets": [0, 2**36]}}
    header, file = json.dumps(head).encode(), directory / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    size = file.stat().st_size + 2**36
    os.truncate(file, size)
    found = [Checkpoint(directory).identity["weights"]]
    for place in (size - 2**36, size - 1, size // 2):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"\x3f")
        found.append(Checkpoint(directory).identity["weights"])
    # The last change lies between two runs.
    assert len(set(found)) == 3 and found[3] == found[2]


@pytest.mark.parametrize("engine", ["lean", "hf"])
def test_end_tokens_are_those_of_the_files_and_of_the_tokenizer_as_in_vllm(directory, engine):
    # vLLM: the tokenizer's own (4 here), and those of generation_config.json, or without the file of config.json.
    change_config(directory, eos_token_id=[1, 2])
    generation = directory / "generation_config.json"
    generation.unlink(missing_ok=True)
    assert load_lm(str(directory), loader=engine).info.eos_ids == (1, 2, 4)
    for listed, ends in ((7, (7, 4)), ([4, 7], (4, 7)), (None, (4,))):
        generation.write_text(json.dumps({"eos_token_id": listed}))
        assert load_lm(str(directory), loader=engine).info.eos_ids == ends


END, RETURN, USER = "<|im_end|>", "<|return|>", "<|User|>"
# The next message's token ends an answer (GLM).
OPEN = "{%- for m in messages %}{{ '<|User|>' if m.role == 'user' else '<|Assistant|>' }}{{ m.content }}{%- endfor %}"
# A template that closes the last answer as all other messages.
CLOSED = HARMONY.replace("'<|return|>' if loop.last and not add_generation_prompt else '<|end|>'", "'<|end|>'")


@pytest.mark.parametrize(
    ("template", "own", "listed", "expected"),
    [
        (CHATML, END, [END], [END]),
        (CHATML, "<s>", ["<s>"], ["<s>", END]),  # a base model's files
        (CHATML, "<s>", [END], [END, "<s>"]),
        (HARMONY, "<s>", [RETURN], [RETURN, "<s>"]),  # <|end|> ends a thought
        (HARMONY, RETURN, [], [RETURN]),
        (HARMONY, "<s>", [], ["<s>", RETURN]),
        (CLOSED, RETURN, [RETURN], [RETURN]),
        (OPEN, "<s>", ["<s>", USER], ["<s>", USER]),
    ],
)
def test_what_ends_a_turn_in_the_template_ends_an_answer_and_disagreement_is_said_once(
    template, own, listed, expected, tmp_path, capsys
):
    directory = chat_model(tmp_path / "model", template, own)
    tokenizer = load_tokenizer(str(directory))
    (directory / "generation_config.json").unlink(missing_ok=True)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in listed]
    change_config(directory, eos_token_id=ids)
    ends = tuple(map(tokenizer.convert_tokens_to_ids, expected))
    opened = Checkpoint(directory)
    assert load_lm(opened).info.eos_ids == opened.end_tokens == ends
    notes = [line for line in capsys.readouterr().err.splitlines() if "end tokens of" in line]
    assert len(notes) == (set(listed) != set(expected))
    for note in notes:
        said = f"config.json {ids}, the tokenizer {tokenizer.eos_token_id}, its chat template"
        assert said in note and note.endswith(f"end at each of {list(ends)}")


def test_an_index_that_names_the_whole_file_counts_and_a_leftover_one_does_not(directory):
    """Unsloth adds an MTP module to a model of one file as a second file and an index; transformers sees one."""
    save_file({"mtp.fc.weight": torch.zeros(1)}, directory / "model-mtp.safetensors")
    names = {name: "model.safetensors" for name in load_file(directory / "model.safetensors")}
    for more, files in (("model-mtp.safetensors", ["model-mtp.safetensors", "model.safetensors"]), ("", [])):
        shards = {**names, "mtp.fc.weight": more} if more else {"a": "model-00001-of-00002.safetensors"}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        assert [file.name for file in Checkpoint(directory).files] == (files or ["model.safetensors"])
    save_file({"a": torch.zeros(1)}, directory / "model-00001-of-00002.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors and model-00001.*vLLM and SGLang read the shards"):
        Checkpoint(directory).files  # noqa: B018


def test_without_an_index_a_stray_file_is_no_shard(directory):
    """A file of other weights, which would replace those of the shards behind it."""
    whole = directory / "model.safetensors"
    before, names = load_lm(str(directory)).model.state_dict(), sorted(expected := load_file(whole))
    for number, part in enumerate((names[:5], names[5:]), 1):
        save_file({name: expected[name] for name in part}, directory / f"model-0000{number}-of-00002.safetensors")
    save_file({name: value + 1 for name, value in expected.items()}, directory / "model-old.safetensors")
    whole.unlink()
    found = load_lm(str(directory)).model.state_dict()
    assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in before)


def test_auto_is_float32_on_a_cpu_and_else_the_checkpoints_own_type(directory):
    def auto(device: str) -> str:
        return dtype_of("auto", Checkpoint(directory), device)

    assert load_lm(str(directory), dtype="bfloat16").dtype == torch.bfloat16
    change_config(directory, dtype="bfloat16")
    assert (auto("cpu"), auto("cuda"), auto("cuda:1")) == ("float32", "bfloat16", "bfloat16")
    assert load_lm(str(directory)).dtype == load_outer(str(directory)).dtype == torch.float32
    with pytest.raises(InputError, match="dtype: found int8"):
        load_lm(str(directory), dtype="int8")
    change_config(directory, dtype=None)
    change_state(directory, lambda state: state.update({name: value.half() for name, value in state.items()}))
    assert auto("cuda") == "float16", "as transformers, without a type in config.json"


@pytest.mark.parametrize("engine", ["lean", "hf"])
def test_tensors_of_other_modules_are_left_out_and_named(pristine, directory, capsys, engine):
    def add(state) -> None:
        own = {name: value for name, value in state.items() if ".layers.0." in name}
        state |= {name.replace("model.layers.0", "mtp.layers.0"): value.clone() for name, value in own.items()}
        state |= {name.replace("layers.0", "layers.2"): value.clone() for name, value in own.items()}
        if engine == "hf":
            state["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)

    change_state(directory, add)
    found, expected = (load_lm(str(path), loader=engine) for path in (directory, pristine))
    ids = torch.arange(5, 30)
    assert torch.equal(found.logits(ids, 9), expected.logits(ids, 9))
    first = "model.layers.0.self_attn.q_proj.bias" if engine == "hf" else "model.layers.2.input_layernorm.weight"
    assert f"are no part of the model, and not read: {first}" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "named"), [("missing", DOWN), ("extra", "side_proj"), ("shape", DOWN)])
def test_tensors_that_do_not_fit_the_config_are_named(directory, change, named):
    def spoil(state) -> None:
        if change == "extra":
            state["model.layers.1.mlp.side_proj.weight"] = torch.zeros(2, 2)
        else:
            weight = state.pop(DOWN)
            if change == "shape":
                state[DOWN] = weight[:, :-1].contiguous()

    change_state(directory, spoil)
    with pytest.raises(InputError, match=named.removeprefix("model.")):
        load_lm(str(directory))
    if change != "extra":  # transformers would fill it with random numbers
        with pytest.raises(InputError, match="model"):
            load_lm(str(directory), loader="hf")


def test_an_output_embedding_of_its_own_counts_in_a_model_that_says_it_is_tied(tmp_path):
    directory = tiny_llama_dir(tmp_path / "model", tie_word_embeddings=True)
    change_state(
        directory, lambda state: state.update({"lm_head.weight": torch.randn(state["model.embed_tokens.weight"].shape)})
    )
    oracle, ids = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), torch.arange(5, 30)
    with torch.no_grad():
        expected = oracle(ids[None]).logits[0]
    lm, outer = load_lm(str(directory)), load_outer(str(directory))
    write_gguf_model(tmp_path / "model.gguf", Checkpoint(directory))
    gguf, hidden = load_lm(str(tmp_path / "model.gguf")), lm.features(ids[None])[0]
    for name, logits in {
        "lean": lm.lm_head(hidden),
        "outer": outer.lm_head(hidden),
        "gguf": gguf.lm_head(gguf.features(ids[None])[0]),
    }.items():
        # Logits of order 10 through two float32 layers; with the embedding they are off by 10.
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("engine", ["lean", "hf"])
def test_a_tied_model_without_its_embedding_is_refused(tmp_path, engine):
    tiny_llama_dir(tmp_path, tie_word_embeddings=True)
    change_state(tmp_path, lambda state: state.pop("model.embed_tokens.weight"))
    with pytest.raises(InputError, match=r"embed_tokens\.weight"):
        load_lm(str(tmp_path), loader=engine)


def test_tokenizers_are_compared_by_content(pristine, directory, tmp_path):
    check_same_tokenizer(Checkpoint(pristine), Checkpoint(directory))
    tokenizer = load_tokenizer(str(directory))
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(str(directory))
    check_same_tokenizer(Checkpoint(pristine), Checkpoint(directory))  # the same vocabulary
    assert (
        Checkpoint(pristine).tokenizer_identity["chat_template"]
        != Checkpoint(directory).tokenizer_identity["chat_template"]
    )
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(str(directory))
    with pytest.raises(InputError, match="head: found"):
        check_same_tokenizer(Checkpoint(pristine), Checkpoint(directory))
    with pytest.raises(InputError, match="without tokenizer files"):
        load_tokenizer(str(gpt2(tmp_path / "bare")))


def test_a_token_that_the_model_does_not_have_is_one_error(directory, capsys):
    tokenizer = load_tokenizer(str(directory))
    tokenizer.add_tokens(["<|new|>"])  # and no embedding for it: an index error on a CPU, a lost device on a GPU
    tokenizer.save_pretrained(str(directory))
    for loader in ("lean", "hf"):
        words = ["decode", "say <|new|>", "--target", str(directory), "--method", "ar", "--loader", loader]
        assert main(words) == 2
        assert "tokens: found id " in capsys.readouterr().err.splitlines()[-1]
    (directory / "rows.jsonl").write_text(json.dumps({"prompt": "say <|new|>"}))
    words = ["data", "prompts", "--source", str(directory / "rows.jsonl"), "--target", str(directory)]
    assert main([*words, "--output", str(directory / "prompts")]) == 2
    assert "tokens: found id " in capsys.readouterr().err.splitlines()[-1]
    lm = load_lm(str(directory))
    with pytest.raises(InputError, match="ids below"):
        generate_all(lm, [[1, 2], [lm.info.vocab_size]], SamplingParams(), 4, 32)
    with pytest.raises(InputError, match="ids below"):
        pad_right([[-1]], lm)


def test_the_bias_of_an_output_embedding_counts(tmp_path):
    torch.manual_seed(0)
    config = transformers.PhiConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=3
    )
    model = transformers.PhiForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    lm, hidden = load_lm(str(tmp_path)), torch.randn(3, 16)
    outer, some = load_outer(str(tmp_path)), torch.tensor([3, 40, 7])
    with torch.no_grad():
        for way in (lm, outer):
            torch.testing.assert_close(way.lm_head(hidden), model.lm_head(hidden))
            torch.testing.assert_close(way.lm_head_of(some)(hidden), model.lm_head(hidden)[:, some])


def test_logits_that_are_scaled_and_bounded_behind_the_output_embedding_are_the_models_own(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    capped = transformers.Gemma2Config(vocab_size=50, num_key_value_heads=1, head_dim=8, eos_token_id=3, **sizes)
    scaled = transformers.GraniteConfig(vocab_size=50, eos_token_id=3, logits_scaling=8.0, **sizes)
    for kind, config in ((transformers.Gemma2ForCausalLM, capped), (transformers.GraniteForCausalLM, scaled)):
        torch.manual_seed(0)
        model = kind(config).eval()
        # Logits of 20 and more, which a softcap of 30 changes.
        model.model.embed_tokens.weight.data.normal_(std=4.0)
        directory = tmp_path / config.model_type
        model.save_pretrained(directory)
        lm, outer, ids = load_lm(str(directory)), load_outer(str(directory)), torch.arange(5, 30)[None]
        with torch.no_grad():
            expected, states = model(ids).logits, lm.features(ids)
            for way in (lm, outer):
                torch.testing.assert_close(way.lm_head(states), expected, atol=1e-5, rtol=1e-5)
            assert not torch.allclose(model.lm_head(states), expected, atol=0.1)


@pytest.mark.parametrize(("model_type", "named"), [
    ("llama", "PreTrainedTokenizerFast"), ("mistral", "LlamaTokenizerFast"), ("qwen3", "Qwen2Tokenizer"),
    ("gemma2", "PreTrainedTokenizerFast"), ("gpt_oss", "GPT2Tokenizer"),
])  # fmt: skip
def test_a_tokenizer_is_loaded_without_the_class_of_its_models_config(tmp_path, model_type, named):
    """Compare with transformers' own loading, which imports that class and takes longer."""
    tiny_tokenizer().save_pretrained(str(tmp_path))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": named}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 2048}))
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    text = "Hello  def f(x):\n\treturn 12é <s>"
    assert type(ours) is type(theirs) and ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template and ours.special_tokens_map == theirs.special_tokens_map

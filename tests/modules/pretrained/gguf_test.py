"""Targets in GGUF, beside transformers' own reading of the same files, and files that no target can be read from."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from gguf_models import write_gemma3, write_gguf_model
from worlds import tiny_llama_dir

from draftsmith.modules.pretrained.checkpoint import Checkpoint, load_tokenizer
from draftsmith.modules.pretrained.gguf import (
    copied_metadata,
    dequantized_directory,
    is_gguf_model,
    open_gguf,
    quantization,
    read_gguf_head,
    read_tensor,
)
from draftsmith.modules.pretrained.gguf_writer import write_gguf
from draftsmith.modules.pretrained.hub import loadable
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
TEXT = "Change 17 to 4242, then: print('hello')\n\n  x = é ü 日本<|end|>"


def logits(lm, ids):
    return lm.lm_head(lm.features(ids))


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "max_position_embeddings": 9000}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_a_float32_file_is_the_model_it_was_written_from(tmp_path, family, extra):
    directory = tiny_llama_dir(tmp_path / "model", family=family, **extra)
    write_gguf_model(tmp_path / "model.gguf", Checkpoint(directory))
    ours, original = load_lm(str(tmp_path / "model.gguf")), load_lm(str(directory))
    ids = torch.randint(5, ours.info.vocab_size, (2, 40))
    assert torch.equal(logits(ours, ids), logits(original, ids))
    assert ours.info.eos_ids == original.info.eos_ids and ours.info.max_position == original.info.max_position
    tokenizer, known = load_tokenizer(str(tmp_path / "model.gguf")), load_tokenizer(str(directory))
    assert tokenizer(TEXT).input_ids == known(TEXT).input_ids
    assert tokenizer.get_vocab() == known.get_vocab() and tokenizer.chat_template == known.chat_template
    config = json.loads((tmp_path / "model.gguf.dequantized" / "config.json").read_text())
    assert config["bos_token_id"] is None, "the file has none, and LlamaConfig's default is 1"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_quantized_file_has_the_logits_that_transformers_reads_from_it(tmp_path, family):
    directory = tiny_llama_dir(tmp_path / "model", family=family, hidden=64, head_dim=128)  # Qwen3's in transformers
    write_gguf_model(tmp_path / "model.gguf", Checkpoint(directory), "q8_0")
    ours = load_lm(str(tmp_path / "model.gguf"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.randint(5, ours.info.vocab_size, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(ours, ids), logits(load_lm(str(directory)), ids), atol=1e-3)
    assert "Q8_0" in ours.info.identity["gguf"]


@pytest.mark.parametrize("changes", [{}, {"gemma3.rope.freq_base_swa": 1e4}])  # which newer files name
def test_a_gemma_3_is_the_model_it_was_written_from(tmp_path, changes):
    model = write_gemma3(tmp_path / "model.gguf", changes)
    ours, ids = load_lm(str(tmp_path / "model.gguf")), torch.randint(4, model.config.vocab_size, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, ids), model(ids).logits, rtol=1e-5, atol=1e-5)
    assert ours.info.eos_ids == (1,) and "F32" in ours.info.identity["gguf"]
    assert is_gguf_model(tmp_path / "model.gguf"), "as a draft model of llama.cpp"
    tokenizer = load_tokenizer(str(tmp_path / "model.gguf"))
    names = ["<bos>", "the", "▁the", "▁▁▁", "x", "<0xC3>", "<0xA9>"]  # as llama.cpp splits it
    assert tokenizer.convert_ids_to_tokens(tokenizer("the the   xé").input_ids) == names
    assert tokenizer.decode(tokenizer("the the   xé").input_ids, skip_special_tokens=True) == "the the   xé"


@pytest.mark.parametrize(
    ("changes", "more", "words"),
    [
        ({"gemma3.rope.scaling.factor": 8.0}, {}, "gemma3.rope.scaling.factor 8.0"),  # from 4B on
        ({"gemma3.attention.key_length": 128}, {}, "gemma3.attention.key_length 128"),  # 27B
        ({"gemma3.final_logit_softcapping": 30.0}, {}, "gemma3.final_logit_softcapping 30.0"),
        ({"gemma3.rope.freq_base_swa": 5e4}, {}, "gemma3.rope.freq_base_swa 50000.0"),
        ({"gemma3.attention.sliding_window": 0}, {}, "gemma3.attention.sliding_window 0"),
        ({"gemma3.rope.freq_base": 0.0}, {}, "gemma3.rope.freq_base 0.0"),
        ({"gemma3.feed_forward_length": [64] * 7}, {}, "expected int, got list"),
        ({"gemma3.feed_forward_length": 32}, {}, r"93 tensors, of which transformers reads 72, not model.layers.0.mlp"),
        ({}, {"blk.0.attn_q.bias": torch.ones(512)}, "94 tensors, of which transformers reads 93"),
        # As many as there should be.
        ({"gemma3.block_count": 8}, {f"blk.7.{n}": torch.ones(1) for n in range(13)}, "of which .* 93, not .*layers.7"),
    ],
)
def test_what_transformers_does_not_read_of_a_gemma_3_is_refused(tmp_path, changes, more, words):
    write_gemma3(tmp_path / "model.gguf", changes, more)
    with pytest.raises(InputError, match=words) as error:
        load_lm(str(tmp_path / "model.gguf"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "model.gguf.dequantized").exists()


def test_it_is_dequantized_once_until_the_file_changes(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf_model(file, Checkpoint(tiny_llama_dir(tmp_path / "one")))
    weights = dequantized_directory(file) / "model-00001.safetensors"
    first = weights.stat().st_mtime_ns, weights.stat().st_ino
    os.utime(file)  # another time and the same content
    assert loadable(str(file)) == str(dequantized_directory(file))
    assert (weights.stat().st_mtime_ns, weights.stat().st_ino) == first
    write_gguf_model(file, Checkpoint(tiny_llama_dir(tmp_path / "two", seed=1)))
    changed = load_lm(str(file))
    ids = torch.randint(5, changed.info.vocab_size, (1, 20))
    assert torch.equal(logits(changed, ids), logits(load_lm(str(tmp_path / "two")), ids))


def test_other_files_are_refused_in_one_line_and_leave_nothing(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    write_gguf_model(file, Checkpoint(tiny_llama_dir(tmp_path / "model")))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="a whole GGUF file"):
        load_lm(str(file))
    write_gguf(file, "gemma2", {}, {"token_embd.weight": torch.zeros(4, 4)})
    with pytest.raises(InputError, match="architecture gemma2"):
        load_lm(str(file))
    write_gguf(file, "llama", {}, {"blk.0.ffn_gate_exps.weight": torch.zeros(4, 4)})
    with pytest.raises(InputError, match="tensors of another design"):
        load_lm(str(file))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf", "model.gguf.dequantized.lock"]
    file.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"draftsmith\[llamacpp\]"):
        load_lm(str(file))


@pytest.mark.parametrize("record", [{}, {"sha256": 5, "types": {}}, {"types": {"Q8_0": 3}}, [1]])
def test_a_record_of_another_form_is_none(tmp_path, record):
    (tmp_path / "gguf.json").write_text(json.dumps(record))
    assert quantization(tmp_path) is None


def test_a_heads_file_without_tensors_is_named_as_such(tmp_path):
    write_gguf(tmp_path / "head.gguf", "eagle3", {}, {})
    with pytest.raises(InputError, match="GGUF without tensors, expected a head's weights"):
        read_gguf_head(tmp_path / "head.gguf")


@pytest.mark.parametrize("kind", ["array", "arrays", "text", "key", "tensors", "settings"])
def test_counts_beyond_the_files_end_are_refused_at_once(tmp_path, kind):
    """Files as the specification of GGUF lays them out; the package's own reader would run for years."""
    file, key = tmp_path / "model.gguf", struct.pack("<Q1sI", 1, b"a", 9 if "array" in kind else 8)
    arrays = {"array": struct.pack("<IQ", 5, 2**62), "arrays": struct.pack("<IQ", 9, 2**62)}
    value = {**arrays, "text": struct.pack("<Q", 2**62)}.get(kind, b"")
    counts = {"tensors": (10**8, 0), "settings": (0, 2**62)}.get(kind, (0, 1))
    entry = struct.pack("<Q", 2**63) if kind == "key" else key + value
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + entry + bytes(4096))
    said = r"an array of 4,611,[\d,]+ items" if "array" in kind else r"entries of [\d,]+ bytes"
    with pytest.raises(InputError, match=rf"EOFError: {said} in 4,1\d\d.*a whole GGUF file"):
        open_gguf(file)
    with pytest.raises(InputError, match="whole GGUF file"):
        read_gguf_head(file)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tiny Llama, and the metadata and tensors of its GGUF file."""
    directory = tiny_llama_dir(tmp_path_factory.mktemp("plain") / "model")
    file = directory.with_name("model.gguf")
    write_gguf_model(file, Checkpoint(directory))
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization")
    metadata = {name: value for name, value in copied_metadata(file).items() if not name.startswith(skipped)}
    return directory, metadata, {name: read_tensor(tensor) for name, tensor in open_gguf(file)[1].items()}


def changed(values, changes):
    """Return values with changes; ... removes one."""
    return {name: value for name, value in {**values, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        # llama.cpp, src/llama-model.cpp, load_hparams: the type is linear by default, and scale_linear is the old name.
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4.0),
        ({"rope.scaling.type": "linear"}, 1.0),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
    ],
)
def test_rotary_settings_are_read_as_llama_cpp_reads_them(plain, tmp_path, metadata, factor):
    directory, fields, tensors = plain
    file = tmp_path / "model.gguf"
    write_gguf(file, "llama", fields | {f"llama.{name}": value for name, value in metadata.items()}, tensors)
    ours, ids = load_lm(str(file)), torch.arange(5, 105)[None]
    config = transformers.AutoConfig.from_pretrained(directory)
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": factor}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    with torch.no_grad():
        # Logits of order 10 through two float32 layers; with another factor they are off by 1 and more.
        torch.testing.assert_close(logits(ours, ids), theirs(ids).logits, atol=1e-4, rtol=0)


REFUSED = [
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, {}, "scaling.type: found longrope"),
    ({"llama.rope.scaling.factor": "four"}, {}, "rope.scaling.factor: found four"),
    ({"llama.rope.scaling.attn_factor": 1.5}, {}, "rope.scaling.attn_factor: found 1.5"),
    ({"llama.rope.dimension_count": 4}, {}, "rope.dimension_count: found 4, expected 8"),
    ({"llama.rope.scaling.factor": 4.0}, {"rope_freqs.weight": torch.ones(4)}, "rope_freqs.weight.*linear"),
    ({}, {"rope_freqs.weight": torch.ones(8)}, r"rope_freqs.weight: found \[8\], expected \[4\]"),
    ({"llama.attention.head_count": [4, 4]}, {}, r"head_count: found \[4, 4\], expected one number"),
    ({"llama.attention.head_count_kv": 0}, {}, "head_count_kv: found 0"),
    ({"llama.attention.value_length": 4}, {}, "value_length: found 4"),
    ({"llama.expert_count": 8, "llama.expert_used_count": 2}, {}, "llama.expert_count 8"),
    ({"llama.context_length": ...}, {}, "context_length: found nothing"),
    ({}, {"token_embd.weight": ...}, "0 rows of token_embd.weight"),
    ({}, {"blk.1.ffn_up.weight": ...}, "1 tensors missing.*layers.1.mlp.up_proj.weight"),
    ({"split.count": 2, "split.no": 0}, {"blk.1.ffn_up.weight": ...}, "part 1 of 2 of a split file.*--merge"),
    ({"tokenizer.ggml.pre": ...}, {}, "tokenizer.ggml.pre missing"),
    ({"tokenizer.ggml.pre": "seed-coder"}, {}, "tokenizer.ggml.pre seed-coder"),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "tensors", "words"), REFUSED)
def test_what_llama_cpp_computes_in_another_way_is_refused_by_name(
    plain, tmp_path, monkeypatch, metadata, tensors, words
):
    _, fields, weights = plain
    file = tmp_path / "model.gguf"
    write_gguf(file, "llama", changed(fields, metadata), changed(weights, tensors))
    monkeypatch.setattr("draftsmith.modules.pretrained.gguf.write_tensors", None)  # refused before anything big is read
    with pytest.raises(InputError, match=words) as error:
        load_lm(str(file))
    assert "\n" not in str(error.value)


def test_more_tokens_than_rows_and_two_tensors_at_one_place_are_refused(plain, tmp_path):
    _, fields, weights = plain
    file = tmp_path / "model.gguf"
    write_gguf(
        file,
        "llama",
        fields,
        {name: each[:-4] if "emb" in name or name == "output.weight" else each for name, each in weights.items()},
    )
    with pytest.raises(InputError, match="with 313 tokens and 309 rows"):
        load_lm(str(file))
    write_gguf(file, "llama", fields, weights)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file, "r+").tensors}
    # The last part of a tensor's entry is its place.
    tensors["blk.1.ffn_up.weight"].field.parts[-1][0] = tensors["blk.0.ffn_up.weight"].field.parts[-1][0]
    del tensors
    with pytest.raises(InputError, match=r"blk.0.ffn_up.weight and blk.1.ffn_up.weight at one place"):
        load_lm(str(file))


def test_answers_end_where_they_end_in_llama_cpp(plain, tmp_path):
    """llama.cpp adds tokens of known texts to the metadata's (src/llama-vocab.cpp, special_eog_ids)."""
    _, fields, weights = plain
    file = tmp_path / "model.gguf"
    write_gguf(file, "llama", fields | {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}, weights)
    assert load_lm(str(file)).info.eos_ids == (7, 9, fields["tokenizer.ggml.tokens"][0].index("<|end|>"))


def test_a_place_that_cannot_be_written_uses_the_cache(tmp_path, monkeypatch):
    folder: Path = tmp_path / "models"
    folder.mkdir()
    write_gguf_model(folder / "model.gguf", Checkpoint(tiny_llama_dir(tmp_path / "tiny")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Root may write anywhere: a file where the lock would be stands for a disk that refuses.
    (folder / "model.gguf.dequantized.lock").mkdir()
    directory = dequantized_directory(folder / "model.gguf")
    assert directory.is_relative_to(tmp_path / "cache")
    shutil.rmtree(tmp_path / "tiny")
    assert dequantized_directory(folder / "model.gguf") == directory
    load_lm(str(folder / "model.gguf"))

"""Identity hashes of models and tokenizers: what changes them, and what does not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from worlds import tiny_llama_dir

from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import load_lm


def identity(directory: Path, **how: Any) -> dict[str, str]:
    return load_lm(str(directory), **how).info.identity


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def copy(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


@pytest.mark.parametrize("engine", ["lean", "hf"])
def test_one_changed_value_is_another_model(pristine, copy, engine):
    state = load_file(copy / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"][3, 5] += 0.01
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    before, after = identity(pristine, loader=engine), identity(copy, loader=engine)
    assert [key for key in before if before[key] != after[key]] == ["weights"]


@pytest.mark.parametrize("tied", [False, True])
def test_shards_types_engines_and_prefixes_are_the_same_model(tmp_path, tied):
    # bfloat16 weights, so that each type holds them exactly.
    first = tiny_llama_dir(tmp_path / "first", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
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


def test_what_decides_token_ids_is_in_the_encoding(pristine, copy):
    before = Checkpoint(pristine).tokenizer_identity
    file = copy / "tokenizer.json"
    original = json.loads(file.read_text())

    def now(**changes: Any) -> dict[str, str]:
        file.write_text(json.dumps({**original, **changes}))
        return Checkpoint(copy).tokenizer_identity

    assert now(truncation={"max_length": 5, "strategy": "LongestFirst", "direction": "Right", "stride": 0}) == before
    merges = original["model"]["merges"]
    as_text = [" ".join(pair) if isinstance(pair, list) else pair for pair in merges]
    assert now(model={**original["model"], "merges": as_text, "ignore_merges": False}) == before
    fewer = now(model={**original["model"], "merges": merges[:-1]})
    lower = now(normalizer={"type": "Lowercase"})
    for other in (fewer, lower):
        assert other["tokenizer"] == before["tokenizer"] and other["encoding"] != before["encoding"]
    assert fewer["encoding"] != lower["encoding"]


def test_a_large_tensor_is_sampled_from_its_first_value_to_its_last(copy):
    """A tensor of 64 GB, whose file has holes: its values would take a minute to read."""
    head = {"x": {"dtype": "BF16", "shape": [2**19, 2**16], "data_offsets": [0, 2**36]}}
    header, file = json.dumps(head).encode(), copy / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    size = file.stat().st_size + 2**36
    os.truncate(file, size)
    found = [Checkpoint(copy).identity["weights"]]
    for place in (size - 2**36, size - 1, size // 2):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"\x3f")
        found.append(Checkpoint(copy).identity["weights"])
    # The last change lies between two runs.
    assert len(set(found)) == 3 and found[3] == found[2]

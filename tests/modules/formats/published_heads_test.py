"""Heads that others published are read as their trainers compute them, and servers do with them what is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published_heads import Published, heads, outcome, write
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftsmith.modules.formats.base import TargetFacts
from draftsmith.modules.formats.foreign import detect
from draftsmith.modules.formats.llama import frequencies
from draftsmith.modules.pretrained.directory import read_package
from draftsmith.modules.rotary import rope_attention_scale

HEADS = heads()


@pytest.fixture(scope="module", params=HEADS)
def written(request, tmp_path_factory) -> tuple[Published, TargetFacts, Path, dict[str, Tensor]]:
    """A head, its target's facts, its directory, and the tensors in its file."""
    head, directory = HEADS[request.param], tmp_path_factory.mktemp("heads") / "head"
    facts = head.facts()
    return head, facts, directory, write(head, facts, directory)


def test_it_is_read_and_served_as_before(written):
    head, facts, directory, _ = written
    assert outcome(head, facts, directory) == head.outcome


@pytest.fixture
def read(written):
    """A head, the tensors in its file, and how `import` reads it."""
    head, facts, directory, tensors = written
    package = read_package(str(directory))
    return head, tensors, detect(package, facts).read(package, facts)


def test_every_tensor_is_one_of_the_files(read):
    _, tensors, imported = read
    turned = "neighbors in the file" in "".join(imported.notes)
    for name, tensor in imported.state.items():
        if name == "d2t":
            assert torch.equal(tensor, tensors["d2t"] + torch.arange(len(tensor)))
        elif not (turned and ".self_attn." in name):
            same = [disk for disk, one in tensors.items() if one.shape == tensor.shape and torch.equal(one, tensor)]
            assert len(same) == 1 and same[0].split(".")[-2:][-1] == name.split(".")[-1], name


def test_it_reads_the_layers_that_its_trainer_reads(read):
    """SafeAILab: modeling_llama_kv.py; SpecForge: model_providers.py; DeepSpec, z-lab: extract_context_feature."""
    head, _, imported = read
    layers, count = getattr(imported.config, "aux_layers", ()), head.target[1]
    ids = head.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    ids = ids or head.block.get("target_layer_ids")
    if states := head.config.get("aux_hidden_state_layer_ids"):  # speculators: resolve_target_layer_ids
        assert layers == tuple(states)
    elif layers:  # counted as transformers' hidden_states, of which the first is the embedding
        assert layers == (tuple(number + 1 for number in ids) if ids else (2, count // 2, count - 3))


def test_it_rotates_as_transformers_which_its_trainer_builds(read):
    head, _, imported = read
    if (llama := getattr(imported.config, "llama", None)) is None:
        return
    block = hasattr(imported.config, "block_size")
    settings, rotary = (Qwen3Config, Qwen3RotaryEmbedding) if block else (LlamaConfig, LlamaRotaryEmbedding)
    plain = {"rope_theta": 10000.0, "num_key_value_heads": None, "head_dim": llama.head_dim}
    # SpecForge turns text by mrope as by none (LlamaMutiRotaryEmbedding).
    sections = {"rope_scaling": None} if (head.layer.get("rope_scaling") or {}).get("type") == "mrope" else {}
    theirs = rotary(settings(**{**plain, **head.layer, **sections}))
    assert torch.allclose(frequencies(llama), theirs.inv_freq, rtol=1e-5)
    assert rope_attention_scale(llama.rope_scaling) == pytest.approx(theirs.attention_scaling)

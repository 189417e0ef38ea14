"""Both engines against transformers' own forward on whole sequences; chains and trees are read in session_test.py."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.tables import path_to, random_tree
from transformers import AutoModelForCausalLM
from worlds import tiny_llama_dir

from draftsmith.modules.engine import lean
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

# Logits are of order 10 and pass through two float32 layers whose sums are ordered differently in fused kernels.
TOLERANCE = 1e-4
# Of rotary settings every spelling is in models_test.py.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mha": {"num_key_value_heads": 4},
    "llama-attention-bias": {"attention_bias": True},
    "llama-mlp-bias": {"mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-wide-heads": {"head_dim": 16},
    "llama-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-3},
    "llama-rope-llama3": {"rope_parameters": LLAMA3},
    "llama-rope-scout": {"rope_parameters": {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}},
    "mistral-window": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
    "qwen3-attention-bias": {"attention_bias": True, "tie_word_embeddings": True},
}
# What the universal engine adds does not depend on a layer's switches.
SOME = ["llama", "llama-tied", "llama-rope-llama3", "mistral-window", "qwen3"]
PREFIX = 11  # longer than the sliding window, so that it hides something everywhere
# Layers that differ: the lean path refuses them, the universal one must window the right layers.
MIXED_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


@dataclass(frozen=True)
class Case:
    """A tiny model, as transformers runs it and as our two engines do."""

    directory: Path

    @cached_property
    def oracle(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()

    @cached_property
    def engines(self) -> dict[str, Any]:
        return {engine: load_lm(str(self.directory), loader=engine) for engine in ("lean", "hf")}

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return [T, V] of a whole sequence by transformers, without a cache."""
        with torch.no_grad():
            return self.oracle(torch.tensor([tokens]), use_cache=False).logits[0]

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(self.oracle.config.vocab_size) for _ in range(count)]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory) -> Any:
    @cache
    def make(name: str) -> Case:
        directory = tmp_path_factory.mktemp(name)
        return Case(tiny_llama_dir(directory, family=name.split("-")[0], **VARIANTS[name]))

    return make


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "engine"), [*((name, "lean") for name in VARIANTS), *((name, "hf") for name in SOME)])
def test_whole_sequences(case_of, name, engine):
    """Embeddings, features and logits, with right padding too."""
    case = case_of(name)
    lm, ids = case.engines[engine], torch.tensor([case.tokens(24, seed) for seed in range(3)])
    with torch.no_grad():
        assert torch.equal(lm.embed(ids), case.oracle.get_input_embeddings()(ids))
        hidden = case.oracle.model(ids, use_cache=False).last_hidden_state
    assert_close(lm.features(ids), hidden)
    assert_close(lm.session(1, 32).extend(ids[:1].tolist()).features, hidden[:1])
    assert_close(lm.lm_head(lm.features(ids)), torch.stack([case.logits(row) for row in ids.tolist()]))
    padded = lm.lm_head(lm.features(torch.cat([ids, torch.zeros(3, 6, dtype=torch.int64)], 1)))
    assert_close(padded[1, :24], case.logits(ids[1].tolist()))
    # A switch that transformers ignored would make these comparisons vacuous.
    assert case.logits(case.tokens(5)).std() > 0.5
    assert (getattr(case.oracle.config, "sliding_window", None) is not None) == ("window" in name)
    biased = any(parameter.endswith("_proj.bias") for parameter, _ in case.oracle.named_parameters())
    assert biased == ("bias" in name or "qwen2" in name)


def test_the_mlp_of_a_long_text_runs_in_pieces(case_of, monkeypatch):
    case = case_of("llama")
    lm, ids = case.engines["lean"], torch.tensor([case.tokens(24, seed) for seed in range(2)])
    with torch.no_grad():
        states = case.oracle.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    monkeypatch.setattr(lean, "MLP_ROWS", 11)
    assert_close(lm.features(ids, aux_layers=(0, 1, 3)), torch.cat(states, -1))


@pytest.mark.parametrize(("name", "engine"), [("llama", "lean"), ("mistral-window", "lean"), ("qwen3", "hf")])
def test_captured_states_are_transformers_own(case_of, name, engine):
    """Of whole texts and of texts read in parts, as chains and as trees, however they are cached."""
    case = case_of(name)
    lm, tokens, before = case.engines[engine], case.tokens(17), list[torch.Tensor]()
    watch = case.oracle.model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
    with torch.no_grad():
        states = case.oracle.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    watch.remove()
    # The embeddings, and what each of two layers leaves; the last one of transformers is normed.
    states = [*states[:2], *before, *states[2:]]
    assert len(states) == 4
    for aux_layers in ((0, 1), (1,), (0, 2), (2, 3), (3,)):
        expected = torch.cat([states[number] for number in aux_layers], -1)
        assert_close(lm.features(torch.tensor([tokens]), aux_layers=aux_layers), expected)
        for rows, static in [(1, False)] if engine == "hf" else [(1, False), (1, True), (2, False)]:
            session = lm.session(rows, 40, aux_layers, static=static)
            session.reset(1)
            features = [session.extend([tokens[:5]]).features[:, :5]]
            features.append(session.extend([tokens[5:9]]).features[:, :4])
            features.append(session.extend([tokens[9:]], [range(-1, 7)]).features[:, :8])
            assert_close(torch.cat(features, 1), expected)
    with pytest.raises(ValueError, match="aux_layers"):
        lm.session(1, 40, (lm.info.num_layers + 2,)).extend([tokens])


def test_features_are_those_of_decoding_under_a_trainings_autocast(case_of):
    # Heads train in mixed precision on features of a frozen model: other features than it decodes with would be a loss.
    lm, ids = case_of("llama").engines["lean"], torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.autocast("cpu", torch.bfloat16):
        features = lm.features(ids)
    assert features.dtype == lm.dtype and torch.equal(features, lm.features(ids))


def test_trees_of_a_model_whose_layers_have_different_windows(tmp_path):
    tiny_llama_dir(tmp_path, family="qwen2", **MIXED_WINDOW)
    with pytest.raises(InputError, match="use_sliding_window"):
        load_lm(str(tmp_path), loader="lean")
    case, lm = Case(tmp_path), load_lm(str(tmp_path))
    assert case.oracle.config.layer_types == ["full_attention", "sliding_attention"]
    kept, nodes, parents = case.tokens(PREFIX), case.tokens(8, seed=1), random_tree(random.Random(2), 8)
    session = lm.session(1, 0)
    assert_close(session.extend([kept], logits_to_keep=PREFIX).logits[0], case.logits(kept))
    logits = session.extend([nodes], [parents], logits_to_keep=8).logits[0]
    for node in range(8):
        assert_close(logits[node], case.logits(kept + [nodes[i] for i in path_to(node, parents)])[-1])

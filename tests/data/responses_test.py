"""Batched answers against transformers, one prompt at a time; sampling against an inverse cdf written in numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from chats import rows_of
from oracles.formulas import warped
from transformers import AutoModelForCausalLM
from worlds import CONTEXT, tiny_llama_dir

from draftsmith.data import prompts, responses
from draftsmith.data.engines.own import RowUniforms, generate_all
from draftsmith.data.prompts import PromptsConfig
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import row_uniforms
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError, SamplingParams

PROMPTS = [[1, 40 + i, *range(60, 60 + 3 * i), 4, 2] for i in range(7)]


@pytest.fixture(scope="module")
def oracle(pair):
    return AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float64).eval()


def greedy(oracle, prompt: list[int], count: int) -> list[int]:
    """Without a cache, in float64: the plainest loop there is."""
    ids = list(prompt)
    for _ in range(min(count, CONTEXT - len(prompt))):
        ids.append(int(oracle(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_row_stops_at_the_end_of_the_context_and_others_go_on(pair, oracle):
    lm = load_lm(str(pair[0]))
    prompts = [PROMPTS[0], (PROMPTS[3] * 40)[: CONTEXT - 3], PROMPTS[2]]
    found = generate_all(lm, prompts, SamplingParams(), 9, 32)
    assert [len(row) for row in found] == [9, 3, 9]
    assert found == [greedy(oracle, prompt, 9) for prompt in prompts]


def test_sampled_tokens_follow_the_warped_distribution_by_the_rows_own_uniforms(chain, oracle):
    config = chain.configs["responses"]
    rows = Rows(Manifest.read(config.output)).read(0, 99)
    assert len(rows) == 11
    params = SamplingParams(config.temperature, config.top_k, config.top_p)
    eos = load_lm(str(chain.target)).info.eos_ids
    assert [row["ended"] for row in rows] == [row["input_ids"][-1] in eos for row in rows]
    for number, row in enumerate(rows):
        start = row["loss_mask"].index(True)
        uniforms = row_uniforms("responses", config.seed, number, config.max_new_tokens)
        logits = oracle(torch.tensor([row["input_ids"]])).logits[0]
        for j, token in enumerate(row["input_ids"][start:]):
            distribution = warped(logits[start + j - 1], params)
            assert token == np.searchsorted(np.cumsum(distribution), uniforms[j], side="right")


def test_a_row_does_not_depend_on_its_company(chain, remake):
    whole = rows_of(chain.directory("responses"))
    directory = remake("responses", batch_size=11, rows_per_shard=11)
    assert rows_of(directory) == whole
    assert rows_of(remake("responses", limit=4, output=directory.with_name("limited"))) == whole[:4]
    reseeded = rows_of(remake("responses", seed=1, output=directory.with_name("reseeded")))
    assert [row["input_ids"] for row in reseeded] != [row["input_ids"] for row in whole]


def test_other_options_begin_anew_where_no_shard_is_finished(chain, remake, tmp_path, monkeypatch, capsys):
    """As the advice of an error says: correct the options and give the command again."""

    def stop(*args):
        raise InputError("prompt 0", "a mistake", "none", "Pass --max-new-tokens 4.")

    with monkeypatch.context() as patched, pytest.raises(InputError, match="a mistake"):
        patched.setattr(responses, "answer_shard", stop)
        remake("responses")
    rows = rows_of(remake("responses", max_new_tokens=4))
    assert max(sum(row["loss_mask"]) for row in rows) == 4
    assert "begun anew with another config.max_new_tokens: 9, now 4" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(InputError, match=r"begun with another config\.max_new_tokens"):
        remake("responses")


def test_uniforms_are_of_their_stage_seed_and_row():
    streams = [("responses", 0, 1), ("responses", 0, 2), ("responses", 1, 1), ("acceptance", 0, 1)]
    drawn = [tuple(row_uniforms(*stream, 5)) for stream in streams]
    assert len(set(drawn)) == len(streams)
    assert tuple(row_uniforms("responses", 0, 1, 3)) == drawn[0][:3]  # a longer answer begins alike
    source = RowUniforms("responses", 0, 1)
    assert [source.uniform() for _ in range(600)] == list(row_uniforms("responses", 0, 1, 600))


def test_a_prompt_that_fills_the_context_is_an_input_error(chain, remake, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x " * CONTEXT}) + "\n")
    prompts = remake("prompts", source=str(tmp_path / "long.jsonl"), max_length=4 * CONTEXT)
    with pytest.raises(InputError, match=rf"prompt 0: found \d+ tokens, expected fewer than .* {CONTEXT}"):
        remake("responses", data=prompts)


def test_prompts_beyond_the_first_range_of_longrope_are_dropped_where_they_are_made(tmp_path):
    """Phi-3 states a context of 256 tokens, and the keys of 48 tokens change once a text is longer."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope["original_max_position_embeddings"] = 48
    target = tiny_llama_dir(tmp_path / "phi", family="phi3", rope_parameters=rope, original_max_position_embeddings=48)
    rows = [{"prompt": "ab"}, {"prompt": "x" * 60}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = PromptsConfig(str(tmp_path / "rows.jsonl"), str(target), tmp_path / "prompts", overlong="drop")
    prompts.run(made)
    assert len(rows_of(made.output)) == Manifest.read(made.output).counts["overlong_dropped"] == 1
    config = responses.ResponsesConfig(made.output, str(target), tmp_path / "out", ignore_eos=True, max_new_tokens=99)
    responses.run(config)
    # An answer fills the context of decoding, which is that of training, too.
    (length,) = [len(row["input_ids"]) for row in rows_of(config.output)]
    assert length == load_lm(str(target)).info.max_position == Checkpoint(target).info.max_position == 48

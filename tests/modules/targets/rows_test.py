"""Rows of different lengths side by side: what transformers says of each sequence alone, in any shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CONTEXT, tiny_llama_dir
from transformers import AutoModelForCausalLM

from draftsmith.data.models.loading import load_lm
from draftsmith.modules.graphs import Graphed
from draftsmith.modules.lean_rows import SPAN_BUCKET

# As in parity_test.py: logits of order 10, float32 layers whose sums are ordered differently.
TOLERANCE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mha": {"num_key_value_heads": 4},
    "mistral-window": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
}
LENGTHS = (3, 19, 11)  # of the prompts: below, above and near the window


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request, tmp_path_factory):
    """(lean model, transformers' own)"""
    directory = tmp_path_factory.mktemp("rows")
    tiny_llama_dir(directory, seed=4, family=request.param.split("-")[0], **VARIANTS[request.param])
    return load_lm(str(directory)), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def alone(oracle: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] and hidden states [T, H] after the final norm of a whole sequence, without a cache."""
    output = oracle(torch.tensor([tokens]), output_hidden_states=True)
    return output.logits[0], output.hidden_states[-1][0]


def tokens_of(lm: Any, *shape: int) -> torch.Tensor:
    return torch.randint(5, lm.info.vocab_size, shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("static", [False, True])
def test_rows_read_what_each_would_read_alone(pair, static):
    lm, oracle = pair
    session = lm.rows_session(3, CONTEXT, static)
    prompts = [tokens_of(lm, length).tolist() for length in LENGTHS]
    for row, prompt in enumerate(prompts):
        scores = session.prefill(row, prompt)
        logits, features = alone(oracle, prompt)
        close(scores.logits, logits[-1:])
        close(scores.features, features)
    kept = list(prompts)
    # Chains of 5, of which the rows keep different parts; the rest is stale and then written over, or not.
    for number, accepted in enumerate([(5, 0, 2), (1, 5, 5), (0, 3, 1)]):
        chains = tokens_of(lm, 3, 5 + number)[:, :5]
        starts = torch.tensor([len(row) for row in kept])
        logits, features = session.extend(chains, starts, int(starts.max()) + 5, num_logits=5 - number)
        assert logits.shape == (3, 5 - number, lm.info.vocab_size)
        for row, chain in enumerate(chains.tolist()):
            expected_logits, expected_features = alone(oracle, kept[row] + chain)
            close(logits[row], expected_logits[len(kept[row]) + number :])
            close(features[row], expected_features[len(kept[row]) :])
        kept = [row + chain[:count] for row, chain, count in zip(kept, chains.tolist(), accepted, strict=True)]


@pytest.mark.parametrize("static", [False, True])
def test_rows_leave_and_rows_begin_again(pair, static):
    lm, oracle = pair
    session = lm.rows_session(3, CONTEXT, static)
    prompts = [tokens_of(lm, length).tolist() for length in LENGTHS]
    for row, prompt in enumerate(prompts):
        session.prefill(row, prompt)
    session.select(torch.tensor([1, 2]))
    new = tokens_of(lm, 2, 2)
    logits, _ = session.extend(new, torch.tensor(LENGTHS[1:]), max(LENGTHS) + 2)
    for row in (0, 1):
        close(logits[row], alone(oracle, prompts[row + 1] + new[row].tolist())[0][-1:])
    # The next group: another prompt over the first row's memory, alone.
    session.prefill(0, prompts[0])
    logits, _ = session.extend(new[:1], torch.tensor(LENGTHS[:1]), LENGTHS[0] + 2)
    close(logits[0], alone(oracle, prompts[0] + new[0].tolist())[0][-1:])


def test_padding_past_the_capacity_spoils_nothing(pair):
    """A row at its end beside a longer chain: its padded inputs have no slots, and its last token sits in the last."""
    lm, oracle = pair
    session = lm.rows_session(2, 20)
    prompts = [tokens_of(lm, 19).tolist(), tokens_of(lm, 4).tolist()]
    for row, prompt in enumerate(prompts):
        session.prefill(row, prompt)
    chains = tokens_of(lm, 2, 6)
    logits, _ = session.extend(chains, torch.tensor([19, 4]), 25, num_logits=6)
    close(logits[0, 0], alone(oracle, prompts[0] + chains[0, :1].tolist())[0][-1])
    close(logits[1], alone(oracle, prompts[1] + chains[1].tolist())[0][4:])


def test_a_static_span_is_one_of_few(pair):
    lm, _ = pair
    rows = lm.rows_session(1, 600)._rows
    assert {rows.span(end, static=True) for end in range(1, 601)} == {SPAN_BUCKET, 2 * SPAN_BUCKET, 608}
    assert [rows.span(end, static=False) for end in (1, 300, 700)] == [1, 300, 608]


def test_without_cuda_a_graph_is_its_function():
    calls = []

    def fn(x, y, power):
        calls.append(power)
        return ((x + y) ** power,)

    assert Graphed(fn)(torch.tensor([1.0]), torch.tensor([2.0]), static=(2,))[0].tolist() == [9.0]
    assert calls == [2]


@pytest.mark.gpu
def test_a_session_of_graphs_reads_like_one_without(pair):
    """Replays with other tokens, lengths and batches than were captured, against the CPU."""
    lm, _ = pair
    from draftsmith.modules.targets.llama import LlamaLM

    graphed = LlamaLM(lm.model.cuda(), lm.info)
    sessions = [lm.rows_session(3, CONTEXT), graphed.rows_session(3, CONTEXT)]
    prompts = [tokens_of(lm, length).tolist() for length in LENGTHS]
    for session in sessions:
        for row, prompt in enumerate(prompts):
            session.prefill(row, prompt)
    for number, rows in enumerate([3, 3, 3, 2, 2]):
        if number == 3:
            for session in sessions:
                session.select(torch.tensor([0, 2]))
        tokens = tokens_of(lm, 3, 6 + number)[:rows, :6]
        starts = torch.tensor([length + number for length in LENGTHS])[:rows]
        expected, features = sessions[0].extend(tokens, starts, int(starts.max()) + 6, num_logits=6)
        found = sessions[1].extend(tokens.cuda(), starts.cuda(), int(starts.max()) + 6, num_logits=6)
        close(found[0].cpu(), expected)
        close(found[1].cpu(), features)
    assert len(sessions[1]._forward._graphs) == 2  # one for each batch size

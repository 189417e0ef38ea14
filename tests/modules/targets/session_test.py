"""Rows of different lengths side by side, chains and trees: what transformers says of each sequence alone, in any
shapes."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from cuda_kernels import CudaKernels
from oracles.tables import path_to, random_tree
from transformers import AutoModelForCausalLM
from worlds import CONTEXT, tiny_llama_dir

from draftsmith.modules.pretrained.models import load_lm

# As in parity_test.py: logits of order 10, float32 layers whose sums are ordered differently.
TOLERANCE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "llama-mha": {"num_key_value_heads": 4},
    "mistral-window": {"sliding_window": 7},
    "qwen3": {},
}
LENGTHS = (3, 19, 11)  # of the prompts: below, above and near the window


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request, tmp_path_factory):
    """(lean model, transformers' own)"""
    directory = tmp_path_factory.mktemp("rows")
    tiny_llama_dir(directory, seed=4, family=request.param.split("-")[0], **VARIANTS[request.param])
    return load_lm(str(directory)), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(params=["cpu", "cuda"])
def kernels(request, monkeypatch):
    """As a CPU is asked to attend, and as a GPU is."""
    return CudaKernels(monkeypatch) if request.param == "cuda" else None


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
@pytest.mark.parametrize("length", LENGTHS)
def test_chains_and_trees_are_read_as_one_text(pair, static, length, kernels):
    """Of different sizes, of which different paths are kept."""
    lm, oracle = pair
    rng = random.Random(3)
    session = lm.session(1, CONTEXT, static=static)
    kept = tokens_of(lm, length).tolist()
    scores = session.extend([kept])
    logits, features = alone(oracle, kept)
    close(scores.logits[0], logits[-1:])
    close(scores.features[0, :length], features)
    for number, size in enumerate((5, 4, 7, 1, 2, 9, 12, 8)):
        fed = tokens_of(lm, size + number)[number:].tolist()
        trees = number % 2 == 1
        parents = random_tree(rng, size) if trees else list(range(-1, size - 1))
        most = size if number % 3 else min(2, size)
        scores = session.extend([fed], [parents] if trees else None, logits_to_keep=most)
        for node in range(size):
            text = kept + [fed[i] for i in path_to(node, parents)]
            expected_logits, expected_features = alone(oracle, text)
            if (place := node - (size - most)) >= 0:
                close(scores.logits[0, place], expected_logits[-1])
            close(scores.features[0, node], expected_features[-1])
        path = path_to(rng.randrange(-1, size), parents)
        session.keep([len(kept)], [[len(kept) + node for node in path]])
        kept += [fed[node] for node in path]
        assert list(session.lengths) == [len(kept)]


@pytest.mark.parametrize("static", [False, True])
def test_rows_read_what_each_would_read_alone(pair, static, kernels):
    """Prompts, then a token each, of which some are fed none; rows that leave, and another group over their memory."""
    lm, oracle = pair
    session = lm.session(3, CONTEXT, static=static)
    kept = [tokens_of(lm, length).tolist() for length in LENGTHS]
    for row, logits in enumerate(session.prefill(range(3), kept)):
        close(logits, alone(oracle, kept[row])[0][-1])
    for sizes in ((1, 1, 1), (0, 1, 0), (1, 0, 1)):
        fed = [tokens_of(lm, 3).tolist()[row : row + size] for row, size in enumerate(sizes)]
        kept = [before + own for before, own in zip(kept, fed, strict=True)]
        logits = session.extend(fed).logits
        for row, size in enumerate(sizes):
            if size:
                close(logits[row], alone(oracle, kept[row])[0][-1:])
    session.select([1, 2])
    on_device = tokens_of(lm, 2, 1)  # tokens of the device are read too
    logits = session.extend(on_device).logits
    for row in (0, 1):
        close(logits[row], alone(oracle, kept[row + 1] + on_device[row].tolist())[0][-1:])
    session.reset(1)
    session.prefill([0], [kept[0][:4]])
    close(session.extend([[7]]).logits[0], alone(oracle, [*kept[0][:4], 7])[0][-1:])


def test_padding_past_the_capacity_spoils_nothing(pair, kernels):
    """The padding of the last tokens has no slots, and the last of these sits in the last one."""
    lm, oracle = pair
    for parents in (None, [[-1, 0, 1, 1, 3]]):
        session = lm.session(1, 20, static=True)
        prompt, fed = tokens_of(lm, 15).tolist(), tokens_of(lm, 5).tolist()
        session.extend([prompt])
        logits = session.extend([fed], parents, logits_to_keep=5).logits
        path = [0, 1, 3, 4] if parents else range(5)
        close(logits[0, 4], alone(oracle, prompt + [fed[i] for i in path])[0][-1])


@pytest.mark.gpu
def test_a_session_of_graphs_reads_like_one_without(pair):
    """Replays with other tokens and lengths than were captured, against the CPU."""
    lm, _ = pair
    from draftsmith.modules.targets.llama import LlamaLM

    graphed = LlamaLM(lm.model.cuda(), lm.info)
    rng = random.Random(1)
    for length in LENGTHS:
        sessions = [lm.session(1, CONTEXT), graphed.session(1, CONTEXT)]
        for session in sessions:
            session.extend([tokens_of(lm, length).tolist()])
        for number in range(4):
            tokens = tokens_of(lm, 6 + number)[:6].tolist()
            parents = [random_tree(rng, 6)] if number % 2 else None
            expected, found = (session.extend([tokens], parents, logits_to_keep=6) for session in sessions)
            close(found.logits[:, :6].cpu(), expected.logits)
            close(found.features[:, :6].cpu(), expected.features)
            for session in sessions:
                session.keep([session.lengths[0] - 5])


def test_a_sessions_cache_goes_with_its_last_reference():
    """Not when the garbage collector comes: an answer's cache would be there beside the next one's."""
    lm = load_lm("embedded:draft")
    gc.disable()
    try:
        session = lm.session(1, 16)
        session.extend([[1, 2, 3]])
        cache = weakref.ref(session.cache)
        del session
        assert cache() is None
    finally:
        gc.enable()

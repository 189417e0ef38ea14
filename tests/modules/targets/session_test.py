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

from draftsmith.modules.engine.rows import SPAN_BUCKET, bucket
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
def test_rows_read_what_each_would_read_alone(pair, static, kernels):
    """Prompts, then chains and trees of different sizes, of which rows keep different parts; some are fed nothing."""
    lm, oracle = pair
    rng = random.Random(3)
    session = lm.session(3, CONTEXT, static=static)
    kept = [tokens_of(lm, length).tolist() for length in LENGTHS]
    scores = session.extend(kept)
    for row, prompt in enumerate(kept):
        logits, features = alone(oracle, prompt)
        close(scores.logits[row], logits[-1:])
        close(scores.features[row, : len(prompt)], features)
    alike, mixed = [(5, 5, 5), (2, 2, 2), (1, 1, 1)], [(4, 7, 1), (1, 2, 1), (6, 0, 9), (3, 12, 8)]
    for number, sizes in enumerate([alike[0], *mixed, *alike[1:], (0, 0, 2), (0, 9, 0), (1, 0, 0), (0, 5, 0)]):
        fed = [tokens_of(lm, size + number)[number:].tolist() for size in sizes]
        trees = number % 2 == 1
        parents = [random_tree(rng, size) if trees else list(range(-1, size - 1)) for size in sizes]
        most = max(sizes) if number % 3 else 2
        scores = session.extend(fed, parents if trees else None, logits_to_keep=most)
        lengths, slots = [], []
        for row, size in enumerate(sizes):
            for node in range(size):
                text = kept[row] + [fed[row][i] for i in path_to(node, parents[row])]
                expected_logits, expected_features = alone(oracle, text)
                place = node - max(size - most, 0)
                if place >= 0:
                    close(scores.logits[row, place], expected_logits[-1])
                close(scores.features[row, node], expected_features[-1])
            path = path_to(rng.randrange(-1, size), parents[row]) if size else []
            lengths.append(len(kept[row]))
            slots.append([len(kept[row]) + node for node in path])
            kept[row] = kept[row] + [fed[row][node] for node in path]
        session.keep(lengths, slots)
        assert list(session.lengths) == list(map(len, kept))


@pytest.mark.parametrize("static", [False, True])
def test_rows_leave_and_rows_begin_again(pair, static, kernels):
    lm, oracle = pair
    session = lm.session(3, CONTEXT, static=static)
    prompts = [tokens_of(lm, length).tolist() for length in LENGTHS]
    session.extend(prompts)
    session.select([1, 2])
    on_device = tokens_of(lm, 2, 2)  # tokens of the device are read too
    new = on_device.tolist()
    logits = session.extend(on_device).logits
    for row in (0, 1):
        close(logits[row], alone(oracle, prompts[row + 1] + new[row])[0][-1:])
    # The next group: another prompt over the first row's memory, alone.
    session.reset(1)
    session.extend(prompts[:1])
    close(session.extend(new[:1]).logits[0], alone(oracle, prompts[0] + new[0])[0][-1:])


def test_padding_past_the_capacity_spoils_nothing(pair, kernels):
    """A row at its end beside a longer chain: its padded inputs have no slots, and its last token sits in the last."""
    lm, oracle = pair
    for trees in (False, True):
        session = lm.session(2, 20)
        prompts = [tokens_of(lm, 19).tolist(), tokens_of(lm, 4).tolist()]
        session.extend(prompts)
        fed = [tokens_of(lm, 1).tolist(), tokens_of(lm, 6).tolist()]
        parents = [[-1], range(-1, 5)] if trees else None
        logits = session.extend(fed, parents, logits_to_keep=6).logits
        close(logits[0, 0], alone(oracle, prompts[0] + fed[0])[0][-1])
        close(logits[1], alone(oracle, prompts[1] + fed[1])[0][4:])


def test_few_shapes_serve_all_sizes(pair):
    """Of chains and trees: a few widths, each over few numbers of slots."""
    lm, _ = pair
    session = lm.session(1, 600, static=True)
    shapes = set()
    for name in ("_chains", "_trees"):
        forward = getattr(session._rows, name)

        def seen(*inputs: torch.Tensor, static: tuple, name: str = name, forward: Any = forward) -> Any:
            shapes.add((name, *(tensor.shape for tensor in inputs), *static))
            return forward(*inputs, static=static)

        setattr(session._rows, name, seen)
    session.extend([[5]])
    for start in range(1, 500, 23):
        session.extend([[5] * 23])
        session.keep([start + 23])
        for size in (1, 5, 6, 7, 8):
            session.extend([[5] * size], logits_to_keep=size)
            session.keep([start + 23])
            session.extend([[5] * size], [random_tree(random.Random(size), size)], logits_to_keep=size)
            session.keep([start + 23])
    assert {bucket(size) for size in (23, 1, 5, 6, 7, 8)} == {32, 1, 8}
    spans = {SPAN_BUCKET, 2 * SPAN_BUCKET, 608}
    assert {own[-2] for own in shapes} == spans and len(shapes) <= 5 * len(spans)


@pytest.mark.gpu
def test_a_session_of_graphs_reads_like_one_without(pair):
    """Replays with other tokens, lengths and batches than were captured, against the CPU."""
    lm, _ = pair
    from draftsmith.modules.targets.llama import LlamaLM

    graphed = LlamaLM(lm.model.cuda(), lm.info)
    sessions = [lm.session(3, CONTEXT), graphed.session(3, CONTEXT)]
    prompts = [tokens_of(lm, length).tolist() for length in LENGTHS]
    for session in sessions:
        session.extend(prompts)
    rng = random.Random(1)
    for number, rows in enumerate([3, 3, 3, 2, 2]):
        if number == 3:
            for session in sessions:
                session.select([0, 2])
        tokens = tokens_of(lm, 3, 6 + number)[:rows, :6].tolist()
        parents = [random_tree(rng, 6) for _ in tokens] if number % 2 else None
        expected, found = (session.extend(tokens, parents, logits_to_keep=6) for session in sessions)
        close(found.logits[:, :6].cpu(), expected.logits)
        close(found.features[:, :6].cpu(), expected.features)
        for session in sessions:
            session.keep([length - 5 for length in session.lengths])


def test_a_sessions_cache_goes_with_its_last_reference():
    """Not when the garbage collector comes: an answer's cache would be there beside the next one's."""
    lm = load_lm("embedded:draft")
    gc.disable()
    try:
        session = lm.session(1, 16)
        session.extend([[1, 2, 3]])
        cache = weakref.ref(session._rows.cache)
        del session
        assert cache() is None
    finally:
        gc.enable()

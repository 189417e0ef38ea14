"""The session of fixed shapes reads what the plain one reads: prompts, chains, trees, with and without a window."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_models import tiny_llama_dir

from draftsmith.data.models.loading import load_lm
from draftsmith.modules.lean_rows import SPAN_BUCKET, bucket
from draftsmith.modules.targets.llama_fixed import MAX_WIDTH, FixedShapeSession

# As in parity_test.py: logits of order 10, float32 layers whose sums are ordered differently.
TOLERANCE = 1e-4
VARIANTS = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen3": {},
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def lm(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fixed")
    extra = {"max_position_embeddings": 1024, **VARIANTS[request.param]}
    return load_lm(str(tiny_llama_dir(directory, seed=4, family=request.param, **extra)))


def random_tree(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(-1, i) for i in range(size)]


@pytest.mark.parametrize("prompt_length", [1, 40, MAX_WIDTH + 30])
def test_scores_are_the_plain_sessions_round_after_round(lm, prompt_length):
    rng = random.Random(prompt_length)
    plain, fixed = lm.session(600), lm.session(600, static=True)
    assert isinstance(fixed, FixedShapeSession)

    def compare(tokens, parents=None, num_logits=1):
        expected = plain.extend(tokens, parents, num_logits)
        found = fixed.extend(tokens, parents, num_logits)
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(found.features, expected.features, rtol=0, atol=TOLERANCE)
        assert fixed.length == plain.length

    compare([rng.randrange(5, 200) for _ in range(prompt_length)])
    # Enough rounds to cross a bucket of slots; some trees keep a path that is not contiguous.
    for size in (1, 6, 17, 64, 3, 128, 33):
        kept, tokens = plain.length, [rng.randrange(5, 200) for _ in range(size)]
        if size % 2:
            compare(tokens, num_logits=size)
            path = list(range(rng.randrange(size)))
        else:
            parents = random_tree(rng, size)
            compare(tokens, parents, num_logits=size)
            path = [size - 1]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
        for session in (plain, fixed):
            session.keep(kept, [kept + node for node in path])
        compare([7])


def test_few_shapes_serve_all_sizes(lm):
    session = FixedShapeSession(lm, 600)
    shapes = set()
    forward = session._forward

    def seen(*inputs):
        shapes.add(tuple(tensor.shape for tensor in inputs))
        return forward(*inputs)

    session._forward = seen
    for start in range(0, 500, 23):
        session.extend([5] * 23)
        session.keep(start + 23)
        for size in (1, 5, 6, 7, 8):
            session.extend([5] * size, num_logits=size)
            session.keep(start + 23)
    assert {bucket(size) for size in (23, 1, 5, 6, 7, 8)} == {32, 1, 8}
    # Three widths, each over two or three numbers of slots: few graphs for any number of rounds.
    assert len(shapes) == len({(ids, bias[1]) for ids, *_, bias in shapes}) <= 3 * (600 // SPAN_BUCKET + 1)


@pytest.mark.gpu
def test_graphs_read_like_the_cpu(lm):
    from draftsmith.modules.targets.llama import LlamaLM

    plain = lm.session(600)
    graphed = LlamaLM(lm.model.cuda(), lm.info).session(600)
    rng = random.Random(1)
    for session in (plain, graphed):
        session.extend(list(range(5, 40)))
    for size in (6, 6, 5, 60, 60):
        kept, tokens, parents = plain.length, [rng.randrange(5, 200) for _ in range(size)], random_tree(rng, size)
        expected, found = (session.extend(tokens, parents, num_logits=size) for session in (plain, graphed))
        torch.testing.assert_close(found.logits.cpu(), expected.logits, rtol=0, atol=10 * TOLERANCE)
        for session in (plain, graphed):
            session.keep(kept, [kept + size - 1])

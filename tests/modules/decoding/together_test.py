"""Operations on all rows together: draws, prompts in groups, several rounds of a GPU with one transfer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from broken_models import small_lm
from tiny_models import CONTEXT, tiny_llama_dir
from transformers import AutoModelForCausalLM

from draftsmith.modules.attention import group_by_length
from draftsmith.modules.decoding.loop import ROUNDS_TOGETHER, DecodeOptions, RowAnswer, RowPool
from draftsmith.modules.finite import NO_TOKEN, NonFinite
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource, draw_rows
from draftsmith.modules.types import SamplingParams

GREEDY = SamplingParams()
LENGTHS = [7, 31, 30, 1, 32, 64, 60, 59, 2, 31]


@pytest.mark.parametrize("size", [8192, 49152, 50257])
def test_rows_of_a_large_vocabulary_are_drawn_by_the_inverse_cdf(size):
    """Against NumPy's cumulative sum in float64; 4096 uniforms, also where half of the vocabulary has no mass."""
    rng = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(64, size, generator=rng)
    logits[::2, size // 3 :] = -torch.inf
    probs = logits.softmax(-1)
    cumulative = probs.double().numpy().cumsum(-1)
    for uniforms in (torch.rand(64, generator=rng, dtype=torch.float64) for _ in range(64)):
        wanted = cumulative[:, -1] * uniforms.numpy()
        expected = [np.searchsorted(own, value, "right") for own, value in zip(cumulative, wanted, strict=True)]
        assert draw_rows(probs, uniforms).tolist() == expected
    ends = draw_rows(probs, torch.full((64,), 1 - 2**-53, dtype=torch.float64))
    assert (probs.gather(1, ends[:, None]) > 0).all()
    probs[3, 1], probs[4], probs[5, 0] = torch.nan, 0, torch.inf
    assert (draw_rows(probs, uniforms) == NO_TOKEN).nonzero()[:, 0].tolist() == [3, 4, 5]


def test_groups_hold_sequences_of_like_lengths():
    groups = group_by_length(LENGTHS, most_tokens=96, most_padding=0.1)
    assert sorted(itertools.chain(*groups)) == list(range(len(LENGTHS)))
    assert [[LENGTHS[i] for i in group] for group in groups] == [[64], [60], [59], [32, 31, 31], [30], [7], [2], [1]]
    assert group_by_length([1, 9], most_tokens=4) == [[1], [0]], "a sequence longer than a group is alone"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prompts_that_are_read_together_are_read_as_alone(tmp_path, family):
    """Logits of the last tokens, states of all, and what follows, against transformers on each prompt; rows in any
    places, which other prompts have had before; a window that a prompt outgrows."""
    path = tiny_llama_dir(tmp_path, family=family, **({"sliding_window": 9} if family == "mistral" else {}))
    lm, oracle = load_lm(str(path)), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = [[(i * 7 + j * j + 3) % 100 for j in range(length)] for i, length in enumerate(LENGTHS)]
    session = lm.session(len(prompts), CONTEXT, (1, 2))
    session.prefill(range(len(prompts)), [[5] * 80] * len(prompts))
    places = [i for i in range(len(prompts)) if i != 4][::-1]
    scores = session.prefill(places, [prompts[place] for place in places])
    with torch.no_grad():
        expected = [oracle(torch.tensor([prompt]), output_hidden_states=True) for prompt in prompts]
        later = [oracle(torch.tensor([[*prompt, 9]])).logits[0, -1] for prompt in prompts]
    for place, logits, states in zip(places, scores.logits, scores.features, strict=True):
        # Sums in float32 in another order.
        close = {"atol": 2e-5, "rtol": 1e-4}
        torch.testing.assert_close(logits[0], expected[place].logits[0, -1], **close)
        torch.testing.assert_close(states[: LENGTHS[place], :32], expected[place].hidden_states[1][0], **close)
    followed = session.extend([[9] if place != 4 else [] for place in range(len(prompts))]).logits[:, 0]
    for place in places:
        torch.testing.assert_close(followed[place], later[place], **close)


def test_prompts_wait_until_a_group_is_free():
    """With 64 rows few prompts are read alone, and most rows are in use."""
    lm, rows, count = small_lm(1), 64, 600
    read = list[int]()
    session = lm.session(rows, 40)
    prefill = session.prefill
    session.prefill = lambda places, tokens: read.append(len(places)) or prefill(places, tokens)
    pool = RowPool(lm, None, GREEDY, rows, 30, DecodeOptions(session=session, max_nodes=0))
    active = list[int]()

    def waiting():
        for i in range(count):
            active.append(pool.num_active)
            yield RowAnswer(lm.info, [1 + i % 5] * 3, 5 + i * 7919 % 19, TorchSource(i), (), i)

    assert len(list(pool.run(waiting()))) == count
    assert sum(size for size in read if size == 1) <= 0.05 * count
    assert sum(active[rows:]) / len(active[rows:]) > 0.85 * rows  # when they are taken


def test_a_broken_row_is_named_within_rounds_that_run_together():
    """A NaN at the sixth token of a row, whatever the rows beside it have emitted by then."""
    assert ROUNDS_TOGETHER > 5
    lm = small_lm(1)
    session = lm.session(3, 60, static=True)
    extend, calls = session.extend, [0]

    def broken(tokens, *others, **more):
        scores = extend(tokens, *others, **more)
        calls[0] += 1
        if calls[0] == 5:
            scores.logits[1] = torch.nan
        return scores

    session.extend = broken
    pool = RowPool(lm, None, GREEDY, 3, 40, DecodeOptions(session=session, max_nodes=0))
    pool.admit([RowAnswer(lm.info, [3, 1, i + 5], 30, TorchSource(i), (), 10 + i) for i in range(3)])
    with pytest.raises(NonFinite) as caught:
        pool.round()
    # Three tokens of the prompt, one of the prefill, and four of the first rounds stand before it.
    assert (caught.value.row, caught.value.position, caught.value.what) == (11, 8, "logits")

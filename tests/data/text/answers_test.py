"""What is learned of an answer, against definitions that are written out: its origins, features, labels and counts."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from chats import ASSISTANT, TARGET, conversation, make_prompts, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.data import acceptance
from draftsmith.data.store.datasets import answer_lengths, open_dataset
from draftsmith.data.text.answers import (
    FROM_ANSWER,
    FROM_PROMPT,
    NEW,
    Repetition,
    Supervision,
    distinct_4grams,
    origins,
    spans,
)
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError

TOKENS = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TOKENS, st.integers(1, 5))
def test_origins_are_those_of_the_first_place_where_the_same_tokens_stood(tokens, size):
    ids, mask = [token for token, _ in tokens], [answered for _, answered in tokens]
    for at, origin in enumerate(origins(ids, mask, size)):
        places = [
            place
            for place in range(size - 1, at)
            if at >= size - 1 and all(ids[place - back] == ids[at - back] for back in range(size))
        ]
        assert origin == (NEW if not places else FROM_ANSWER if mask[places[0]] else FROM_PROMPT)


def test_by_hand():
    #           the prompt                 | the answer: copies 1 2 3 4, says 8, and then itself (8 7 7 8, twice)
    ids = [9, 1, 2, 3, 4, 5] + [1, 2, 3, 4, 8, 7, 7, 8, 7, 7, 8]
    mask = [False] * 6 + [True] * 11
    assert origins(ids, mask)[6:] == [NEW] * 3 + [FROM_PROMPT] + [NEW] * 6 + [FROM_ANSWER]
    shares = Repetition.of([(ids, mask), ([1, 1, 1, 1, 1, 1], [False, False, False, True, True, False])])
    # The second text: its 4-gram ends in the answer first, so its second answer token copies the answer.
    assert shares == Repetition(1 / 13, 2 / 13)
    assert shares.text() == "23% go on with a repetition: 8% of the prompt, 15% of an answer"
    assert Repetition.of([]) == Repetition(0.0, 0.0)


def test_distinct_4grams_of_a_loop():
    # 1 2 1 2 1 2 1 has four 4-grams, 1212 and 2121 twice each; the other answer has one.
    loop, other = [1, 2, 1, 2, 1, 2, 1], [5, 6, 7, 8]
    assert distinct_4grams([loop]) == 2 / 4
    assert distinct_4grams([loop, other]) == pytest.approx(3 / 5)
    assert distinct_4grams([[1, 2]]) is None


# -- conversations that were answered


def test_labels_are_on_answer_tokens_of_every_turn(answered, tmp_path):
    config = acceptance.AcceptanceConfig(answered, TARGET, tmp_path / "out", "embedded:draft", num_threads=1)
    rows = rows_of(acceptance.run(config))
    target, draft = load_lm(TARGET), load_lm("embedded:draft")
    for row in rows:
        whole = torch.tensor([row["input_ids"]])
        q = draft.lm_head(draft.features(whole))[0].softmax(-1)
        p = target.lm_head(target.features(whole))[0].softmax(-1)
        places = [at for start, end in spans(row["loss_mask"]) for at in range(start, end)]
        assert len(places) == len(row["draft_ids"]) == sum(row["loss_mask"])
        # The responses are greedy, so one-hot distributions: Y is the draft's choice, kept where it is the target's.
        assert row["draft_ids"] == [int(q[at - 1].argmax()) for at in places]
        assert row["accept_prob"] == [float(q[at - 1].argmax() == p[at - 1].argmax()) for at in places]
    data = open_dataset(config.output, mix=0.3)
    for i, row in enumerate(rows):
        item = data.item(i, 0)
        drafted, mask = item["loss_mask"], torch.tensor(row["loss_mask"])
        assert not (drafted & ~mask).any()
        order = torch.cumsum(mask, 0) - 1
        assert item["z_ids"][drafted].tolist() == [row["draft_ids"][at] for at in order[drafted].tolist()]
        assert item["z_ids"][~drafted].tolist() == torch.tensor(row["input_ids"])[~drafted].tolist()


def test_supervised_rows_keep_the_sources_answers_of_all_turns(talks, tmp_path, tokenizer):
    directory = make_prompts(talks, tmp_path / "out", supervised=True)
    for number, row in enumerate(rows_of(directory)):
        said = [tokenizer.decode(row["input_ids"][a:b], skip_special_tokens=True) for a, b in spans(row["loss_mask"])]
        assert said == [m["content"] for m in conversation(number) if m["role"] == ASSISTANT]
    last = make_prompts(talks, tmp_path / "last", supervised=True, turns="last")
    for number, row in enumerate(rows_of(last)):
        (span,) = spans(row["loss_mask"])
        *_, wanted = (m["content"] for m in conversation(number) if m["role"] == ASSISTANT)
        assert tokenizer.decode(row["input_ids"][slice(*span)], skip_special_tokens=True) == wanted
    with pytest.raises(InputError, match="turns: found first, expected all, each or last with --supervised"):
        make_prompts(talks, tmp_path / "other", supervised=True, turns="first")


def test_what_will_be_learned_is_counted_by_answers():
    masks = [[0, 0, 1, 1, 1, 0, 1], [1, 1], [], [0], [0, 1, 1, 1, 1, 1, 1, 1]]
    chunks = [
        pa.array([[bit == 1 for bit in mask] for mask in part], pa.list_(pa.bool_())) for part in (masks[:2], masks)
    ]
    lengths, owner = answer_lengths(pa.chunked_array([chunks[0], chunks[1].slice(2)]))
    assert (lengths.tolist(), owner.tolist()) == ([3, 1, 2, 7], [0, 0, 1, 4])
    assert [spans(mask) for mask in masks] == [[(2, 5), (6, 7)], [(0, 2)], [], [], [(1, 8)]]
    learned = Supervision.of(lengths)
    assert (learned.answers, learned.answer_tokens, learned.tokens_p50) == (4, 13, 2.5)
    assert learned.warning() == (
        "warning: 13 answer tokens (fewer than 60,000) and a median answer of 2 tokens (fewer than 16): a head that "
        "learns from this may slow decoding down, whatever its own validation says. Use more prompts, prompts with "
        "longer answers like those that will be served (docs/data.md)."
    )
    assert Supervision.of(np.full(1000, 100)).warning() is None
    assert "a median answer" not in str(Supervision.of(np.full(10, 100)).warning())
    assert "answer tokens" not in str(Supervision.of(np.full(10_000, 9)).warning())
    assert Supervision.of(np.zeros(0, dtype=np.int64)).answers == 0

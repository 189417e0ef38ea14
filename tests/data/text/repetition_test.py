"""Which tokens go on with a repetition, against a definition that is written out, and against text made by hand."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.data.text.answers import FROM_ANSWER, FROM_PROMPT, NEW, Repetition, distinct_4grams, origins

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

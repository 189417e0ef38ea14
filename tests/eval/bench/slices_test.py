"""Slices of traffic, against sums by hand, and on random answers of which it is known whether any slice is below."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.eval.bench.prompts import check_labels, detect_language
from draftsmith.eval.bench.results import Resamples
from draftsmith.eval.bench.slices import slices_of, verdict
from draftsmith.modules.types import InputError


def divided_by(labels: dict[str, list[str]], tokens: np.ndarray, calls: np.ndarray) -> dict:
    masks = {by: {name: np.array(own) == name for name in sorted({*own})} for by, own in labels.items()}
    return {by: {name: (tokens * mask, calls * mask) for name, mask in own.items()} for by, own in masks.items()}


def read(labels: dict[str, list[str]], tokens: np.ndarray, calls: np.ndarray, card=None, texts=None, seed: int = 0):
    divided = divided_by(labels, tokens, calls)
    resamples = Resamples(range(len(tokens)) if texts is None else texts, seed)
    slices = slices_of(divided, resamples, card)
    return slices, verdict(slices, divided, (tokens, calls), resamples, card)


def german_traffic() -> tuple[dict[str, list[str]], np.ndarray, np.ndarray]:
    """30 answers, 10 of them in German, 9 of these on the route eu, at tau 1.25 where the others have 2.5."""
    languages = ["de"] * 10 + ["en"] * 16 + ["fr"] * 4
    tokens = np.array([50.0] * 30)
    calls = np.array([(40.0 if number < 10 else 20.0) + (-1) ** number for number in range(30)])
    labels = {"language": languages, "route": ["eu"] * 9 + ["us"] * 21, "task": ["all"] * 30}
    return labels, tokens, calls


def test_the_slice_that_is_below_the_rest_is_named_with_its_share_and_how_to_take_its_prompts():
    labels, tokens, calls = german_traffic()
    slices, said = read(labels, tokens, calls)
    rows = {(row["by"], row["name"]): row for row in slices}
    # Four French answers are too few, and one task is no division.
    assert {*rows} == {("language", "de"), ("language", "en"), ("route", "eu"), ("route", "us")}
    german = rows["language", "de"]
    assert german["share"] == pytest.approx(1 / 3) and german["tau"] == pytest.approx(500 / calls[:10].sum())
    assert german["rest_tau"] == pytest.approx(1000 / calls[10:].sum())
    low, high = german["difference_ci95"]
    assert low < german["difference"] < high < 0
    assert said[0].startswith("language=de: 33% of the tokens, tau 1.25 where the rest has 2.50 (")
    assert said[0].endswith("Its prompts: --where language=de")
    assert "; 100% of it is in slices above. " in said[1] and said[1].startswith("route=eu: 30%")
    assert said[2:] == ["All other answers: tau 2.50 (no card of this method at this temperature)"]


@pytest.mark.parametrize(("tau", "found"), [(2.5, "as measured"), (3.0, "below"), (2.0, "above")])
def test_all_other_answers_are_compared_with_the_card(tau, found):
    card = {"tau": tau, "tau_ci95": [tau - 0.1, tau + 0.1], "by": {"language": [{"name": "de", "tau": 2.4}]}}
    labels, tokens, calls = german_traffic()
    said = read({"language": labels["language"]}, tokens, calls, card)[1]
    assert "where the rest has 2.50 (" in said[0] and ") and the card 2.40. " in said[0]
    assert said[1] == f"All other answers: tau 2.50, {found} (the card has {tau:.2f})"


def test_answers_of_few_texts_are_few_however_many_they_are():
    labels, tokens, calls = german_traffic()
    texts = [number % 4 for number in range(10)] + list(range(10, 30))  # the German ones are of four conversations
    slices, said = read({"language": labels["language"]}, tokens, calls, texts=texts)
    assert [row["name"] for row in slices] == ["en"] and said[0].startswith("None of 1 slices is below the rest")


def test_random_labels_name_a_slice_in_one_run_of_twenty_and_a_planted_one_is_found():
    def run(seed: int, shortfall: float = 1.0) -> list[str]:
        rng = np.random.default_rng(seed)
        # Answers differ in length and in tau by far more than their rounds do.
        tokens, taus = rng.integers(20, 128, 100).astype(float), rng.choice([1.4, 1.8, 2.0, 2.9], 100)
        shares = {"language": [0.6, 0.2, 0.1, 0.06, 0.04], "route": [0.5, 0.3, 0.2], "task": [0.25] * 4}
        labels = {name: list(rng.choice(list("abcde")[: len(own)], 100, p=own)) for name, own in shares.items()}
        taus = taus * np.where(np.array(labels["language"]) == "b", shortfall, 1)
        return [line.split(":")[0] for line in read(labels, tokens, tokens / taus, seed=seed)[1]]

    assert sum(not run(seed)[0].startswith("None of") for seed in range(60)) <= 6  # more has a probability of 1 %
    assert sum(run(seed, 0.6)[0] == "language=b" for seed in range(20)) >= 18


def test_languages_are_detected_where_no_row_has_a_column_of_them():
    pytest.importorskip("py3langid", reason="the extra `languages` is not installed")
    answers = [
        ("Das ist eine Antwort auf die Frage, die gestellt wurde.", ""),
        ("That is an answer to the question.", ""),
    ]
    detect_language(labels := [{"language": ""}, {"language": ""}], answers)
    assert labels == [{"language": "de"}, {"language": "en"}]
    detect_language(labels := [{"language": "Danish"}, {"language": ""}], answers)
    detect_language(others := [{}, {}], answers)
    assert (labels, others) == ([{"language": "Danish"}, {"language": ""}], [{}, {}])
    check_labels([{"language": "", "route": "a"}], ["language", "route"])
    with pytest.raises(InputError, match="route"):
        check_labels([{"language": "", "route": ""}], ["language", "route"])

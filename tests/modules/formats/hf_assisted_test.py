"""Settings of assisted generation: which of the measured ones is taken, and what is written."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import GenerationConfig

from draftsmith.eval.bench.runner import BASELINES
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.formats import hf_assisted
from draftsmith.modules.formats.hf_assisted import Tuning, choose_tuning
from draftsmith.modules.types import InputError

DRAFT = {"config": "c", "lm_head": "l", "layers": "final-norm"}


def results(speeds: dict[str, float], draft: dict[str, str] | None = DRAFT) -> dict:
    """What `eval bench` writes, as far as it is read."""
    return {
        "meta": {
            "methods": {label: dataclasses.asdict(parse_method(label, BASELINES)) for label in speeds},
            "models": {"draft": draft} if draft is not None else {},
            "prompts": {"source": "embedded:prompts", "count": 12},
            "date": "2026-11-21",
        },
        "methods": [{"method": label, "tokens_per_s": speed} for label, speed in speeds.items()],
    }


@pytest.mark.parametrize(
    ("speeds", "k", "threshold"),
    [
        # Only transformers' own rows count, be they slower than ours.
        ({"ar": 99, "spec:k=7": 90, "hf-assisted:k=5": 30, "hf-assisted:k=20:t=0.4": 40}, 20, 0.4),
        ({"hf-assisted:k=5": 30, "hf-assisted:k=20:t=0.4": 20}, 5, 0.0),
    ],
)
def test_the_fastest_setting_that_transformers_can_follow_is_taken(speeds, k, threshold):
    tuning = choose_tuning(results(speeds), DRAFT)
    assert (tuning.k, tuning.threshold) == (k, threshold)
    assert "12 prompts of embedded:prompts" in tuning.measured and "tokens/s" in tuning.measured


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (results({"spec:k=5": 1}, {**DRAFT, "lm_head": "other"}), "measurements with the draft .*'other'"),
        (results({"ar": 1}, None), "measurements with the draft None"),
        (results({"ar": 1, "spec:k=2": 2}), "found ar, spec:k=2, .*Run eval bench with --methods"),
    ],
)
def test_results_that_say_nothing_of_this_draft_are_refused(found, message):
    with pytest.raises(InputError, match=f"results: .*{message}"):
        choose_tuning(found, DRAFT)


@pytest.mark.parametrize("changes", [{"k": 0}, {"threshold": 1.0}, {"threshold": -0.1}])
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(InputError):
        Tuning(**{"k": 5, **changes})


def test_transformers_reads_the_settings_and_the_other_fields_stay(tmp_path):
    """A threshold of 0 is written: transformers takes 0.4 for an absent one."""
    given = {"eos_token_id": 4, "do_sample": True, "top_k": 7}
    fields = GenerationConfig(**given, assistant_confidence_threshold=0.9).to_diff_dict()
    written = hf_assisted.generation_config(fields, Tuning(6))
    kept = {key: value for key, value in written.items() if key not in hf_assisted.FIELDS}
    assert kept == {**given, "transformers_version": fields["transformers_version"]}
    GenerationConfig(**written).save_pretrained(tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path)
    assert [getattr(read, name) for name in hf_assisted.FIELDS] == [6, "constant", 0.0]

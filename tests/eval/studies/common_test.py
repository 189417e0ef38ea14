"""What studies share: their settings in short, intervals, and numbers as results.json holds them."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from draftsmith.data.console import format_interval, json_values
from draftsmith.data.settings import comma_numbers
from draftsmith.eval.bootstrap import mean_interval
from draftsmith.eval.studies import common
from draftsmith.eval.studies.common import StudyConfig, decode_prompts, measured, prepare, reduced, slug
from draftsmith.modules.types import InputError, SamplingParams


def test_quick_lowers_and_never_raises(tmp_path):
    config = StudyConfig(target="t", prompts="p", limit=3, repeats=4, output=tmp_path)
    quick = reduced(config, {"limit": 5, "repeats": 1}, {"temperatures": "0"})
    assert (quick.limit, quick.repeats, quick.temperatures) == (3, 1, "0")
    everything = StudyConfig(target="t", prompts="p", limit=0, output=tmp_path)
    assert reduced(everything, {"limit": 5}, {}).limit == 5  # 0 takes all prompts, which are more


def test_numbers_are_read_in_order_and_each_once():
    assert comma_numbers("windows", " 4, 2,10", int) == [4, 2, 10]
    assert comma_numbers("temperatures", "0,1", float) == [0.0, 1.0]
    for wrong in ("", "4,4", "4;5"):
        with pytest.raises(InputError, match="windows"):
            comma_numbers("windows", wrong, int)


def test_values_are_plain_json():
    found = json_values({"a": np.float64(1.23456789), "b": [float("nan"), np.int64(7)], "c": (True, "x", None)})
    assert json.loads(json.dumps(found, allow_nan=False)) == {"a": 1.2346, "b": [None, 7], "c": [True, "x", None]}


def test_the_interval_of_a_mean_draws_prompts_and_not_tokens():
    """Two prompts of one token value each: resamples give 0, 1, and the weighted mean between."""
    assert mean_interval([0.0] * 3 + [1.0], ["a"] * 3 + ["b"], seed=0) == (0.0, 1.0)
    assert mean_interval([0.0, 1.0], ["a", "a"], seed=0) == (None, None)
    assert mean_interval([], [], seed=0) == (None, None)
    low, high = mean_interval([0.5] * 4, list("abcd"), seed=0)
    assert (low, high) == (0.5, 0.5)


def test_names_of_summary_keys_and_intervals():
    assert slug("pre+self-verify", "T=1") == "pre_self_verify_t1"
    assert slug("SD, M2 drafts", "T=0.7") == "sd_m2_drafts_t0.7"
    assert (format_interval([1.234, 5.678]), format_interval(None)) == ("1.23-5.68", "")


def test_end_tokens_are_ignored_where_lengths_matter(models, tmp_path):
    def answers(target: str, ignore_eos: bool) -> list[list[int]]:
        config = StudyConfig(
            target=target, prompts=models["prompts"], draft=models["draft"], split="test", limit=2, output=tmp_path,
            max_new_tokens=40, ignore_eos=ignore_eos,
        )  # fmt: skip
        made = decode_prompts(config, prepare(config, ["spec:k=2"]), "ar", SamplingParams(), lambda *_: None)
        return [list(one.tokens) for one in made]

    plain = answers(models["target"], ignore_eos=True)
    directory = shutil.copytree(models["target"], tmp_path / "target")
    end = plain[0][5]  # as if this one ended an answer
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    assert answers(str(directory), ignore_eos=True) == plain and {len(tokens) for tokens in plain} == {40}
    assert answers(str(directory), ignore_eos=False)[0] == plain[0][: plain[0].index(end) + 1]


def test_an_interrupted_study_does_not_measure_twice_and_a_complete_one_does(models, tmp_path, monkeypatch):
    runs = []

    def counted(config):
        runs.append(config.output.name)
        return bench(config)

    bench = common.bench
    monkeypatch.setattr(common, "bench", counted)
    config = StudyConfig(
        target=models["target"], prompts=models["prompts"], draft=models["draft"], keep_tasks="a", limit=1,
        max_new_tokens=4, repeats=1, output=tmp_path,
    )  # fmt: skip
    first = measured(config, ["spec:k=2"], SamplingParams(1.0))
    assert set(first) == {"ar", "spec:k=2"} and first["ar"]["by_task"].keys() == {"a"}
    assert measured(config, ["spec:k=2"], SamplingParams(1.0)) == first and runs == ["bench-t1"]
    measured(dataclasses.replace(config, seed=1), ["spec:k=2"], SamplingParams(1.0))
    (tmp_path / "results.json").write_text("{}")  # the study's own, written last
    measured(dataclasses.replace(config, seed=1), ["spec:k=2"], SamplingParams(1.0))
    assert runs == ["bench-t1"] * 3


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_drafts_end_where_answers_do(models, ignore_eos, tmp_path):
    """So that a replay's rounds are those of the bench that the study rests on."""
    config = StudyConfig(
        target=models["target"],
        prompts=models["prompts"],
        draft=models["draft"],
        ignore_eos=ignore_eos,
        output=tmp_path,
    )
    context = prepare(config, ["spec:k=2"])
    assert context.models.ends == context.eos_ids and bool(context.eos_ids) != ignore_eos

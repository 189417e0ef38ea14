"""Trainings of so many minutes, by a clock that the test moves; and the command, with its own."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from draftsmith.modules.types import InputError
from draftsmith.train.command import run
from draftsmith.train.config import drafter_config
from draftsmith.train.optimizers import TimeLimit, lr_schedule


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def steps_of(limit: TimeLimit, clock: Clock, step_s: float, validates: tuple[int, float], done: int = 0) -> list[float]:
    """Run steps until the plan ends and return the planned share of the training at each; the last step validates too.

    validates: steps between validations, and their seconds.
    """
    shares, total = [], limit.total_steps(done)
    while done < total:
        shares.append(lr_schedule("linear", total, 0.0, 0.0)(done))
        trial = limit.wants_trial()
        clock.now += step_s
        done += 1
        if done % validates[0] == 0 or done == total or trial:
            clock.now += validates[1]
            limit.pause(validates[1])
        total = limit.total_steps(done) if done < total else total
    return shares


@pytest.mark.parametrize(("every", "seconds"), [(7, 6.0), (1000, 6.0), (1000, 35.0)])
def test_the_last_validation_is_inside_the_time(every, seconds):
    """Training ends in time with and without earlier validations, after 20 s of loading; the learning rate nearly
    reaches 0."""
    clock = Clock()
    limit = TimeLimit(2.0, since=clock(), clock=clock)
    clock.now += 20
    limit.begin()
    shares = steps_of(limit, clock, 1.5, (every, seconds))
    assert 100 < clock.now - 1000 <= 120
    assert all(later <= earlier + 0.05 for earlier, later in itertools.pairwise(shares[1:]))
    assert shares[0] > 0.99 and shares[-1] < 0.12


def test_a_resumed_training_has_the_rest_of_the_time():
    clock = Clock()
    limit = TimeLimit(2.0, since=clock(), clock=clock)
    limit.begin()
    for done in range(20):
        assert limit.total_steps(done) > done + 1
        clock.now += 2.0
    state = limit.state()
    assert state["spent"] == 40

    clock.now += 5000
    again = TimeLimit(2.0, since=clock(), clock=clock)
    again.load(state)
    began = clock.now
    assert again.begin() == 40
    shares = steps_of(again, clock, 2.0, (1000, 5.0), done=20)
    assert 60 < clock.now - began <= 80
    # It stands where the first run has left it: a third is done, 40 s of 120 less what is kept for the end.
    assert shares[0] == pytest.approx(1 - 40 / (120 * 0.85), abs=0.03)


def test_a_training_by_the_clock_is_validated_saved_and_finished(artefacts, tmp_path):
    config = drafter_config("medusa")(
        data=artefacts.features, target=str(artefacts.target), output=tmp_path / "head", minutes=0.02, batch_size=4,
        tau_prompts=0, log=("csv",), val_share=0.3,
    )  # fmt: skip
    best = run(config)
    finished = json.loads((tmp_path / "head" / "training.json").read_text())
    assert finished["steps"] >= 1 and finished["last"] and best == tmp_path / "head" / "best"
    assert json.loads((best / "manifest.json").read_text())["step"] <= finished["steps"]
    assert run(config) == best, "it is finished"
    for name, value in (("max_steps", 3), ("epochs", 77)):
        with pytest.raises(InputError, match=f"minutes: found 0.02 with {name} {value}"):
            dataclasses.replace(config, **{name: value})

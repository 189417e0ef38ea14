"""`python benchmarks/tuning.py`: the tuner's choice beside the best of an exhaustive measured sweep.

Every setting that the tuner weighs is decoded for real on the same prompts, interleaved. The best of many noisy numbers
is too good, so the sweep's few best and the tuner's choice are measured against each other once more.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from draftsmith.data.console import say
from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.tables import plain
from draftsmith.eval.cost.clock import clock_of
from draftsmith.eval.tuning.tune import TuneConfig, measured_speeds, prepare, tune
from draftsmith.launch.cli import main_of
from draftsmith.modules.drafters.methods import parse_methods
from draftsmith.modules.types import at_least

WITHIN, SHARE = 0.03, 0.1


@dataclass(frozen=True)
class TuneCheckConfig(TuneConfig):
    """Compares the tuner's choice with the best of all its settings, each decoded for real. Settings as in
    `draftsmith eval tune`.

    Attributes:
        sweep_repeats: runs of every setting on every prompt in the sweep; the median counts.
        finalists: best settings of the sweep that are measured once more with the tuner's choice.
        final_repeats: runs of each of these.
    """

    sweep_repeats: int = 3
    finalists: int = 4
    final_repeats: int = 5


@dataclass(frozen=True)
class TuneCheck:
    """tokens/s of the tuner's choice by the best setting's: in the sweep, and when the best of it were measured again;
    and the seconds of both ways."""

    choice: str
    sweep_best: str
    sweep_ratio: float
    final_best: str
    final_ratio: float
    tune_s: float
    sweep_s: float

    @property
    def passed(self) -> bool:
        return self.final_ratio >= 1 - WITHIN and self.tune_s <= SHARE * self.sweep_s


@sole_writer()
def run(config: TuneCheckConfig) -> int:
    """Print both, write `output`/check.json; 1 where the choice is off by more than 3 %, or took more than a tenth."""
    for field in ("sweep_repeats", "finalists", "final_repeats"):
        at_least(field, getattr(config, field), 1)
    compared = check_choice(config)
    say(json.dumps(asdict(compared), indent=1))
    write_json(config.output / "check.json", asdict(compared))
    return int(not compared.passed)


def check_choice(config: TuneCheckConfig) -> TuneCheck:
    setup = prepare(config)
    clock = clock_of(config.device, config.num_threads)
    started = clock()
    choice = tune(config, setup)
    tune_s = clock() - started
    say(f"tuned: {choice.label} in {tune_s:.1f} s")
    named = setup.settings
    started = clock()
    sweep = measured_speeds(
        config, setup, named, config.sweep_repeats, lambda count: say(f"swept a prompt, {clock() - started:.0f} s")
    )
    sweep_s = clock() - started
    order = sorted(sweep, key=lambda label: -sweep[label])
    expected = {item.label: item.tokens_per_s for item in choice.predicted}
    make_directory(config.output)
    rows = [{"setting": n, "measured": plain(sweep[n]), "predicted": plain(expected[n])} for n in order]
    write_json(config.output / "sweep.json", rows)
    again = list(dict.fromkeys([*order[: config.finalists], choice.label]))
    final = measured_speeds(config, setup, parse_methods(",".join(again)), config.final_repeats)
    best = max(final, key=lambda label: final[label])
    for label in again:
        say(f"{label}: {sweep[label]:.1f} tokens/s in the sweep, {final[label]:.1f} in the final")
    own = sweep[choice.label] / sweep[order[0]], final[choice.label] / final[best]
    return TuneCheck(choice.label, order[0], own[0], best, own[1], tune_s, sweep_s)


if __name__ == "__main__":
    sys.exit(main_of(TuneCheckConfig, run))

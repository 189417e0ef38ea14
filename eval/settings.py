"""Settings that many measurements share, each with its help written once (as `data/settings.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.data.settings import Loading
from draftsmith.eval.cost.clock import ClockName, clock_name


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How long answers are.

    Attributes:
        max_new_tokens: longest answer.
        ignore_eos: go on after the end token, up to max_new_tokens.
    """

    max_new_tokens: int = 128
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class ChosenPrompts:
    """Which prompts are answered.

    Attributes:
        split: keep prompts of this split (train, dev or test of embedded:prompts).
        keep_tasks: keep prompts whose own task is one of these, separated by commas.
        limit: only the first so many prompts; 0 takes all.
    """

    split: str | None = None
    keep_tasks: str | None = None
    limit: int = 0


@dataclass(frozen=True, kw_only=True)
class Decoding(Loading):
    """How models that decode are loaded.

    Attributes:
        packed: on a CPU, hold large weights in the layout of its kernels (lean engine).
    """

    packed: bool = True

    @property
    def loading(self) -> dict[str, Any]:
        return super().loading | {"packed": self.packed}


@dataclass(frozen=True, kw_only=True)
class TimedDecoding(Decoding):
    """How decoding is run and timed.

    Attributes:
        num_threads: CPU threads. With one, CPU time is the clock; it does not see other programs.
        seed: of sampling, and of the bootstrap.
    """

    num_threads: int = 1
    seed: int = 0

    @property
    def clock(self) -> ClockName:
        return clock_name(self.device, self.num_threads)

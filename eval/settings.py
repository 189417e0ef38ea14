"""Settings that the commands of this folder share, each with its help written once (as data/settings.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.data.settings import Loading
from draftsmith.eval.cost.clock import ClockName, clock_name


@dataclass(frozen=True, kw_only=True)
class Decoding(Loading):
    """How models that decode are loaded.

    Attributes:
        packed: On a CPU, hold large weights in the layout of its kernels (lean engine).
    """

    packed: bool = True

    @property
    def loading(self) -> dict[str, Any]:
        return super().loading | {"packed": self.packed}


@dataclass(frozen=True, kw_only=True)
class Running(Decoding):
    """How models run while they decode.

    Attributes:
        num_threads: CPU threads. With one, CPU time is the clock where speed is measured; it does not see other
            programs.
        seed: Of sampling, and of the bootstrap.
    """

    num_threads: int = 1
    seed: int = 0

    @property
    def clock(self) -> ClockName:
        """The clock of all that is measured with these settings."""
        return clock_name(self.device, self.num_threads)


@dataclass(frozen=True, kw_only=True)
class PromptChoice:
    """Which prompts are taken of a source.

    Attributes:
        split: Keep prompts of this split (train, dev or test of embedded:prompts).
        keep_tasks: Keep prompts whose own task is one of these, separated by commas.
    """

    split: str | None = None
    keep_tasks: str | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerLength:
    """How long answers are.

    Attributes:
        max_new_tokens: Longest answer.
        ignore_eos: Go on after the end token, up to max_new_tokens.
    """

    max_new_tokens: int = 128
    ignore_eos: bool = False

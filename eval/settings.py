"""Settings that the commands of this folder share, each with its help written once (as data/settings.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.data.settings import Loading
from draftsmith.eval.clock import ClockName, clock_name


@dataclass(frozen=True, kw_only=True)
class Decoding(Loading):
    """How models that decode are loaded.

    Attributes:
        packed: On a CPU, hold weights in the layout of its kernels (lean engine).
        draft_precision: Of the weights of what drafts, on a CPU: a draft model's, a head's, and the head's copy of the
            target's lm_head. dtype leaves them as --dtype says; bf16; int8. Answers stay the target's whatever it is.
        target_precision: Of the target's weights, on a CPU with the lean engine: dtype, or int8. Answers are those of
            the target in int8, which is another model.
    """

    packed: bool = True
    draft_precision: Literal["dtype", "bf16", "int8"] = "dtype"
    target_precision: Literal["dtype", "int8"] = "dtype"

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_lm` for the target."""
        return super().loading | {"packed": self.packed, "precision": self.target_precision}


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

"""Options that the commands of this folder share, each with its help written once (as data/settings.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from draftsmith.data.settings import Loading
from draftsmith.eval.clock import ClockName, clock_name


@dataclass(frozen=True, kw_only=True)
class Running(Loading):
    """Loading of models that decode, with their threads and seed.

    Attributes:
        packed: Hold weights in the layout of the CPU's kernels (lean engine).
        draft_precision: Precision of the drafts' weights on a CPU, with the head's copy of lm_head; dtype leaves them
            as --dtype says. Answers stay the target's.
        target_precision: Precision of the target's weights on a CPU with the lean engine. Fewer bits are another model.
        num_threads: CPU threads. With one, speed is measured in CPU time, which does not see other programs.
        seed: Seed of sampling, and of the bootstrap.
    """

    help_group: ClassVar[str] = "Models"
    help_rarely: ClassVar[tuple[str, ...]] = ("packed", "draft_precision", "target_precision")

    packed: bool = True
    draft_precision: Literal["dtype", "int8", "int4"] = "dtype"
    target_precision: Literal["dtype", "int8", "int4"] = "dtype"
    num_threads: int = 1
    seed: int = 0

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_lm` for the target."""
        return super().loading | {"packed": self.packed, "precision": self.target_precision}

    @property
    def clock(self) -> ClockName:
        return clock_name(self.chosen_device, self.num_threads)


@dataclass(frozen=True, kw_only=True)
class PromptChoice:
    """Prompts that are taken from a source.

    Attributes:
        split: Keep prompts of this split (train, dev or test of embedded:prompts).
        keep_tasks: Keep prompts whose own task is one of these, separated by commas.
    """

    split: str | None = None
    keep_tasks: str | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerLength:
    """Length of answers.

    Attributes:
        max_new_tokens: Longest answer.
        ignore_eos: Continue after the end token, up to max_new_tokens.
    """

    max_new_tokens: int = 128
    ignore_eos: bool = False

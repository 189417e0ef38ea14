"""Settings that many commands share, each with its help written once.

A command's dataclass extends what it needs of these. Where its default is another, or the setting does not decide what
is written (`volatile`), it declares the field again, and the help stays this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.data.models.loading import pick_device
from draftsmith.data.store.manifest import volatile
from draftsmith.modules.types import InputError, SamplingParams

Dtype = Literal["float32", "bfloat16", "float16", "auto"]
Engine = Literal["auto", "lean", "hf"]


@dataclass(frozen=True, kw_only=True)
class RemoteCode:
    """Trust in models.

    Attributes:
        trust_remote_code: Run code that comes with a model or its tokenizer.
    """

    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Loading(RemoteCode):
    """How models are loaded.

    Attributes:
        dtype: Type of the weights: float32, bfloat16, float16, or auto for the checkpoint's own.
        engine: How models run: lean for Llama-family weights, hf for any transformers model; auto takes lean where it
            can.
        device: cpu, cuda, cuda:1, ...
    """

    dtype: Dtype = "float32"
    engine: Engine = "auto"
    device: str = "cpu"

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_lm`."""
        names = ("dtype", "engine", "device", "trust_remote_code")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class StageLoading(Loading):
    """How a stage loads models, alone or as one of many processes.

    Attributes:
        device: cpu, cuda:0, ... ; auto takes this rank's GPU where there is one.
        num_threads: CPU threads; 0 is torch's own choice.
    """

    device: str = volatile("auto")
    num_threads: int = volatile(0)
    trust_remote_code: bool = volatile(False)

    @property
    def loading(self) -> dict[str, Any]:
        return super().loading | {"device": pick_device(self.device)}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How next tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_k: Sample among the k most probable tokens; 0 is all.
        top_p: Sample among the most probable tokens that hold this much probability; 1 is all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p)


def comma_numbers(field: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Numbers separated by commas.

    Raises:
        InputError: no number, something else, or one twice.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        values = [kind(part) for part in parts]
    except ValueError as error:
        raise InputError(field, repr(text), "numbers separated by commas", "Correct it.") from error
    if not values or len(set(values)) < len(values):
        raise InputError(field, repr(text), "one or more different numbers", "Correct it.")
    return values


def check_positive(config: Any, *names: str) -> None:
    """Raises InputError for fields that must be 1 or more."""
    for name in names:
        if getattr(config, name) < 1:
            raise InputError(name, getattr(config, name), "1 or more", "Pass a positive number.")


def check_not_negative(config: Any, *names: str) -> None:
    """Raises InputError for fields in which 0 means off."""
    for name in names:
        if getattr(config, name) < 0:
            raise InputError(name, getattr(config, name), "0 (off) or more", "Pass a number that is not negative.")

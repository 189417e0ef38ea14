"""Options that many commands share, each with its help written once.

A command's dataclass inherits the options it needs. Where its default differs, or the option does not affect what is
written (`volatile`), the field is declared again and keeps this help.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from draftsmith.data.store.manifest import volatile
from draftsmith.modules.pretrained.heads import MODEL, kind_at
from draftsmith.modules.pretrained.models import pick_device
from draftsmith.modules.types import InputError, SamplingParams

Dtype = Literal["float32", "bfloat16", "float16", "auto"]
Engine = Literal["auto", "lean", "hf"]
ROLES = ("target", "mid", "acceptance")  # other models, named by their options


@dataclass(frozen=True, kw_only=True)
class RemoteCode:
    """Trust in models.

    Attributes:
        trust_remote_code: Run code that comes with a model or its tokenizer.
    """

    help_group: ClassVar[str] = "Models"
    help_rarely: ClassVar[tuple[str, ...]] = ("trust_remote_code",)

    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Loading(RemoteCode):
    """Options for loading models.

    Attributes:
        dtype: Type of the weights: float32, bfloat16, float16, or auto for the checkpoint's own.
        engine: lean for Llama-family weights, hf for any transformers model, auto for lean where it applies.
        device: cpu, cuda, cuda:1, ... ; auto takes this rank's GPU, or the CPU without one.
    """

    help_group: ClassVar[str] = "Models"
    help_rarely: ClassVar[tuple[str, ...]] = ("engine",)

    dtype: Dtype = "float32"
    engine: Engine = "auto"
    device: str = "auto"

    @property
    def chosen_device(self) -> str:
        return pick_device(self.device)

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_lm`."""
        names = ("dtype", "engine", "trust_remote_code")
        return {name: getattr(self, name) for name in names} | {"device": self.chosen_device}


@dataclass(frozen=True, kw_only=True)
class StageLoading(Loading):
    """Options for loading models in a stage, which may be one of many processes.

    Attributes:
        num_threads: CPU threads; 0 is torch's own choice.
    """

    device: str = volatile("auto")
    num_threads: int = volatile(0)
    trust_remote_code: bool = volatile(False)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options for sampling.

    Attributes:
        temperature: 0 is greedy.
        top_k: Sample among the k most probable tokens; 0 is all.
        top_p: Sample among the most probable tokens that hold this much probability; 1 is all.
    """

    help_group: ClassVar[str] = "Sampling"

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Options of a command that uses drafters.

    Attributes:
        draft: Draft model, or the directory of a trained head; repeated for several.
    """

    draft: tuple[str, ...] | str | None = volatile(())
    several: ClassVar[bool] = False  # whether it takes several drafters of one kind

    def __post_init__(self) -> None:
        value: Any = self.draft
        object.__setattr__(self, "draft", (value,) if isinstance(value, str) else tuple(value or ()))

    @property
    def drafters(self) -> dict[str, str]:
        """Paths by `draft` (a language model) or the kind of the head; `kind@name` for each of several of a kind."""
        paths: dict[str, str] = {}
        by_kind: dict[str, list[str]] = {}
        for path in self.draft or ():
            kind = kind_at(path) or MODEL
            if kind == "acceptance":
                remedy = "Pass it with --acceptance."
                raise InputError("draft", f"{path}, an acceptance head", "a model or head that drafts", remedy)
            by_kind.setdefault(kind, []).append(path)
            if kind in paths and not self.several:
                found = f"{paths[kind]} and {path}, two {'draft models' if kind == MODEL else f'{kind} heads'}"
                remedy = "Measure each in a bench of its own, then compare: draftsmith eval compare RUN RUN."
                raise InputError("draft", found, "one of a kind", remedy)
            paths.setdefault(kind, path)
        for kind, own in by_kind.items():
            if len(own) > 1:
                paths |= {f"{kind}@{name}": path for name, path in zip(short_names(own), own, strict=True)}
        return paths

    @property
    def paths(self) -> dict[str, str]:
        """Paths of `drafters`, and of the command's other models by their options."""
        names = {field.name for field in dataclasses.fields(self)} & set(ROLES)
        others = {role: getattr(self, role) for role in ROLES if role in names}
        return {role: str(path) for role, path in others.items() if path} | self.drafters


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last part in which all paths differ, for each: a and b of runs/a/best and runs/b/best."""
    parts = [Path(path).parts for path in paths]
    for depth in range(1, min(map(len, parts)) + 1):
        names = [re.sub(r"[^\w.+-]", "_", own[-depth]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [str(number) for number in range(1, len(paths) + 1)]


def comma_numbers(field: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Parse different numbers separated by commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        values = [kind(part) for part in parts]
    except ValueError as error:
        raise InputError(field, repr(text), "numbers separated by commas", "Correct it.") from error
    if not values or len(set(values)) < len(values):
        raise InputError(field, repr(text), "one or more different numbers", "Correct it.")
    return values


def check_positive(config: Any, *names: str) -> None:
    """Raise InputError for fields that are not 1 or more."""
    for name in names:
        if getattr(config, name) < 1:
            raise InputError(name, getattr(config, name), "1 or more", "Pass a positive number.")


def check_not_negative(config: Any, *names: str) -> None:
    """Raise InputError for negative fields, in which 0 means off."""
    for name in names:
        if getattr(config, name) < 0:
            raise InputError(name, getattr(config, name), "0 (off) or more", "Pass a number that is not negative.")

"""Options that many commands share, each with its help written once.

A command's dataclass inherits the options it needs. Where its default differs, or the option does not affect what is
written (`volatile`), the field is declared again and keeps this help.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from draftsmith.modules.types import InputError, SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from draftsmith.modules.pretrained.checkpoint import Checkpoint

Dtype = Literal["float32", "bfloat16", "float16", "auto"]
Loader = Literal["auto", "lean", "hf"]
FeatureDtype = Literal["bf16", "fp8"]


def volatile(default: Any = dataclasses.MISSING, presence: bool = False, **kwargs: Any) -> Any:
    """Declare a configuration field that does not change what is written.

    Such are paths (their content is compared by hash), devices, threads and time-outs: a stage may be continued with
    another value. presence: but not with one where there was none.
    """
    if default is not dataclasses.MISSING:
        kwargs["default"] = default
    return dataclasses.field(metadata={"volatile": True, "presence": presence}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class RemoteCode:
    """Trust in models.

    Attributes:
        trust_remote_code: Run code that comes with a model or its tokenizer.
    """

    help_group: ClassVar[str] = "Target"
    help_rarely: ClassVar[tuple[str, ...]] = ("trust_remote_code",)

    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Target(RemoteCode):
    """The target and what runs beside it: how they are loaded, and where they run.

    Attributes:
        dtype: Type of the weights; auto is float32 on a CPU, elsewhere the checkpoint's own.
        loader: lean for Llama-family weights, hf for any transformers model, auto for lean where it applies.
        device: cpu, cuda, cuda:1, ... ; auto takes this rank's GPU, or the CPU without one.
    """

    help_group: ClassVar[str] = "Target"
    help_rarely: ClassVar[tuple[str, ...]] = ("loader",)

    dtype: Dtype = "auto"
    loader: Loader = "auto"
    device: str = "auto"

    @property
    def chosen_device(self) -> str:
        from draftsmith.data.ranks import pick_device

        return pick_device(self.device)

    @property
    def runs_here(self) -> bool:
        """Return whether this process, or one that it starts, computes the target."""
        return True

    def open(self, model: str) -> tuple[Self, Checkpoint]:
        """Open the target, and return these options with the type that `--dtype auto` means for it, to be recorded."""
        from draftsmith.modules.pretrained.checkpoint import Checkpoint

        target = Checkpoint(model, self.trust_remote_code)
        return with_dtype(self, target, self.chosen_device) if self.runs_here else self, target

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_lm`."""
        names = ("dtype", "loader", "trust_remote_code")
        return {name: getattr(self, name) for name in names} | {"device": self.chosen_device}


@dataclass(frozen=True, kw_only=True)
class ServedTarget(Target):
    """Options for loading a target, or for asking a server about it.

    Attributes:
        server: Address of a vLLM server that runs the target (`draftsmith launch vllm`). Only the target's
            embeddings, final norm and lm_head are then loaded here.
    """

    server: str | None = None

    @property
    def target_server(self) -> str | None:
        return self.server

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_target`."""
        if self.target_server is None:
            return super().loading
        check_left_out(self, ["loader"], "with --server", "none: the server runs the target")
        return super().loading | {"server": self.target_server}


@dataclass(frozen=True, kw_only=True)
class StageTarget(Target):
    """Options for loading models in a stage, which may be one of many processes.

    Attributes:
        num_threads: CPU threads; 0 is torch's own choice.
    """

    help_group: ClassVar[str] = "Target"

    device: str = volatile("auto")
    num_threads: int = volatile(0)
    trust_remote_code: bool = volatile(False)


C = TypeVar("C", bound="DataclassInstance")


def with_dtype(config: C, target: Checkpoint, device: str) -> C:
    """Return the options with the type that `--dtype auto` means, so that artifacts and runs record it."""
    from draftsmith.modules.pretrained.models import dtype_of

    changes: Any = {"dtype": dtype_of(vars(config)["dtype"], target, device)}
    return dataclasses.replace(config, **changes)


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


def check_left_out(config: Any, names: Sequence[str], where: str, expected: str) -> None:
    """Raise InputError for fields that have no effect `where` the command is used, unless they have their defaults."""
    for name in names:
        if getattr(config, name) != type(config).__dataclass_fields__[name].default:
            raise InputError(name, f"{getattr(config, name)} {where}", expected, "Leave it out.")

"""Settings of `draftsmith plan`: those of the training, and what planning asks beside them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.store.manifest import volatile
from draftsmith.modules.types import at_least, at_most
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.config import MOST, TrainDrafterConfig, drafter_config


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What planning asks beside a training's own settings.

    Attributes:
        data: The artefact to train on; where it is not there yet, its size is assumed.
        output: Where the training would write.
        world: Ranks to plan for, on all machines together; 0 takes what a launcher has set, or --devices.
        measure: Time a few real steps here and say how long the whole training takes, with the peak that was measured.
        assume_samples: Samples, where the artefact is not there yet.
        assume_length: Tokens of each of these.
    """

    data: Path = volatile(Path("runs/data"))
    output: Path = volatile(Path("runs/heads"))
    world: int = volatile(0)
    measure: bool = volatile(False)
    assume_samples: int = volatile(60_000)
    assume_length: int = volatile(512)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the training that it is mixed into
        for least, name in ((0, "world"), (2, "assume_samples"), (4, "assume_length")):
            at_least(name, getattr(self, name), least)
            at_most(name, getattr(self, name), MOST)


@functools.cache
def plan_config(kind: str) -> type[TrainDrafterConfig]:
    """The settings of `plan KIND`: those of `train KIND`, and what planning asks."""
    about = f"What `train {kind}` with these settings will take: memory by part and strategy, disk, steps, FLOPs."
    return dataclasses.make_dataclass(
        f"Plan{kind.title()}Config",
        [],
        bases=(PlanOptions, drafter_config(kind)),
        namespace={"__doc__": about, "__module__": __name__},
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class PlanAcceptanceConfig(PlanOptions, TrainAcceptanceConfig):
    """What `train acceptance` with these settings will take: memory by part and strategy, disk, steps, FLOPs."""

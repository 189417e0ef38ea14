"""What a training will take, from its configuration alone: no weights are read.

A plan is made in three steps: the frozen model's sizes (config.json), the documents (an artefact's index, or an
assumption), and a dry run of the step with the largest of them, in which the training's own module runs on tensors
that have a shape and no numbers.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from draftsmith.data.features import INDEX_BYTES_PER_TOKEN
from draftsmith.data.ranks import place
from draftsmith.data.store import feature_codec
from draftsmith.data.store.feature_codec import FeatureDtype
from draftsmith.data.store.files import check_disk
from draftsmith.train.acceptance import TrainAcceptanceConfig
from draftsmith.train.config import TrainConfig, TrainDrafterConfig
from draftsmith.train.data_module import Order
from draftsmith.train.lit_head import LitHead
from draftsmith.train.planning.documents import TrainingDocuments, training_documents
from draftsmith.train.planning.dry_run import DryRun, NotRehearsed
from draftsmith.train.planning.frozen import FROZEN, frozen_model
from draftsmith.train.planning.memory import LAYOUTS, Memory, Resident, Strategy, memory
from draftsmith.train.planning.step import BATCH, WEIGHTS, Counted, batch_of, dry_step
from draftsmith.train.planning.subjects import AcceptanceTraining, DrafterTraining

# Of parts, only so many steps of an epoch are looked at for the largest.
STEPS_LOOKED_AT = 2000
# FLOPs are counted on a document of so many tokens at most: a longer one takes more attention, and that is known.
COUNTED_TOKENS = 512


@dataclass(frozen=True)
class LargestPart:
    """The documents of the largest part that a rank computes at once. tokens: with padding, where a batch has some."""

    lengths: list[int]
    tokens: int


@dataclass(frozen=True)
class TrainingPlan:
    """What a training takes. Bytes, elements, tokens and model FLOPs.

    memories: (strategy, offload) -> of one rank. checkpoint_bytes: of one; disk_bytes: most on the disk at a time.
    feature_bytes: dtype -> on disk; None where there are none.
    """

    job: str
    model: str
    trained: int
    frozen: int
    documents: TrainingDocuments
    world: int
    steps_per_epoch: int
    steps: int
    step_flops: float
    part: LargestPart
    strategy: tuple[Strategy, bool]
    memories: dict[tuple[Strategy, bool], Memory]
    checkpoint_bytes: int
    disk_bytes: int
    feature_bytes: dict[str, int] | None

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch

    @property
    def own(self) -> Memory:
        """Memory of the configured strategy."""
        return self.memories[self.strategy]


Training = DrafterTraining | AcceptanceTraining


def plan_of(config: TrainConfig, world: int = 0, samples: int = 60_000, length: int = 512) -> TrainingPlan:
    """The plan of a training, by its settings.

    world: ranks; 0 takes what a launcher has set, or the config's. samples, length: as of `training_documents`.

    Raises:
        InputError: a model that is none, or of a family that the head cannot take its layer from; NotRehearsed: one
            whose code cannot run without numbers.
    """
    training = training_of(config)
    documents = training_documents(config, training, samples, length)
    world = planned_world(config, world)
    order = order_of(config, documents.lengths)
    part = largest_part(order, documents, world * config.accumulate, training.packed)
    steps = config.max_steps or config.epochs * order.steps_per_epoch
    run = Rehearsal(config, training, part, documents, steps)
    resident = run.resident
    if getattr(config, "target_parallel", "none") == "tensor":
        resident = Resident(resident.base, resident.frozen // world, resident.loading // world)
    strategy = planned_strategy(config, world)
    shown = {key for key in LAYOUTS if key[0] != "one process" or world == 1} | {strategy}
    checkpoint = run.step.weights + run.step.optimizer
    return TrainingPlan(
        job=training.job,
        model=training.frozen.path,
        trained=run.trained,
        frozen=training.frozen.params,
        documents=documents,
        world=world,
        steps_per_epoch=order.steps_per_epoch,
        steps=steps,
        step_flops=run.flops(documents, steps / order.steps_per_epoch) / order.steps_per_epoch,
        part=part,
        strategy=strategy,
        memories={key: memory(resident, run.step, config.accumulate, key[0], world, key[1]) for key in shown},
        checkpoint_bytes=checkpoint,
        # One more than are kept while the newest is written; best/, last/ and the one that replaces either.
        disk_bytes=(config.keep + 1) * checkpoint + 3 * run.step.weights,
        feature_bytes=feature_bytes(training.feature_size, documents.tokens) if training.feature_size else None,
    )


def training_of(config: TrainConfig) -> Training:
    dtype = planned_dtype(config)
    if isinstance(config, TrainDrafterConfig):
        return DrafterTraining(config, frozen_model(config.target, dtype))
    assert isinstance(config, TrainAcceptanceConfig)
    return AcceptanceTraining(config, frozen_model(config.read_model, dtype))


class Rehearsal:
    """A training's models and its largest step, run dry.

    trained: elements of its head. resident, step: bytes.
    """

    def __init__(
        self, config: TrainConfig, training: Training, part: LargestPart, documents: TrainingDocuments, steps: int
    ):
        self._training, self._share = training, documents.loss_share
        on_cpu = planned_device(config) == "cpu"
        run = DryRun(on_cpu)
        try:
            with torch.random.fork_rng(devices=[]), run:
                self._model, frozen, loading = training.frozen.loaded(run, on_cpu, config.engine)
                read = run.now[FROZEN]
                with run.making(WEIGHTS):
                    head = training.head()
                with run.making(FROZEN):
                    module = LitHead(head, training.objective(self._model), config, steps)
                with run.making(BATCH):
                    batch = batch_of(training, part.lengths, documents.loss_share)
                self.step = dry_step(run, module, batch, part.lengths, config.accumulate > 1, not on_cpu)
                longest = int(min(COUNTED_TOKENS, training.context, training.frozen.context))
                self._counted = Counted(run, training, module, longest)
        except RuntimeError as error:  # torch's, of an operator that needs numbers, or has no fake form
            found = f"{training.frozen.path}, whose code goes by numbers ({str(error).partition(chr(10))[0][:200]})"
            raise NotRehearsed("model", found, "one that runs without weights", "Train it without a plan.") from error
        self.trained = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
        # Tables of the head, and a frozen head that drafts.
        more = run.now[FROZEN] - read + run.now[WEIGHTS] - self.step.weights
        # Of a GPU's libraries nothing is known, nor does torch count them.
        self.resident = Resident(own_memory() if on_cpu else 0, frozen + more, loading)

    def flops(self, documents: TrainingDocuments, epochs: float) -> float:
        """FLOPs of an epoch, on average over so many."""
        counted = self._counted.of(documents.lengths, documents.loss_share)
        return counted + self._training.read_flops(self._model, documents.lengths, epochs)


def largest_part(order: Any, documents: TrainingDocuments, shares: int, packed: bool) -> LargestPart:
    """The largest of what a rank computes at once, over the steps of the first epoch.

    shares: ranks times accumulated parts, over which a step's samples are dealt out in turn. packed: without padding.
    """
    best, most = list[int](), -1
    for step in range(min(order.steps_per_epoch, STEPS_LOOKED_AT)):
        _, batch = order.step(step)
        for slot in range(min(shares, len(batch))):
            lengths = [documents.lengths[i] for i in batch[slot::shares]]
            tokens = sum(lengths) if packed else max(lengths) * len(lengths)
            if tokens > most:
                best, most = lengths, tokens
    return LargestPart(best, most)


def planned_world(config: TrainConfig, world: int) -> int:
    """world: what was asked for; 0 takes what a launcher has set, or the config's devices."""
    return world or (place().world if place().launched else config.devices)


def planned_device(config: TrainConfig) -> str:
    """cpu or gpu; unlike in a training, a GPU that is planned for need not be here."""
    if config.accelerator != "auto":
        return config.accelerator
    return "gpu" if torch.cuda.is_available() else "cpu"


def planned_strategy(config: TrainConfig, world: int) -> tuple[Strategy, bool]:
    name = str(config.strategy)
    if name == "auto":
        return ("ddp" if world > 1 else "one process"), False
    return cast(Strategy, name.removesuffix("_offload")), name.endswith("_offload")


def order_of(config: TrainConfig, lengths: Sequence[int]) -> Any:
    """The steps as the data module makes them."""
    return Order(lengths, config.seed, config.batch_size, config.tokens_per_batch, config.group_by_length)


def feature_bytes(size: int, tokens: int) -> dict[str, int]:
    """Bytes on disk, with their index. size: elements of a token's."""
    dtypes: tuple[FeatureDtype, ...] = ("bf16", "fp8")
    return {dtype: tokens * (feature_codec.token_bytes(size, dtype) + INDEX_BYTES_PER_TOKEN) for dtype in dtypes}


def planned_dtype(config: TrainConfig) -> str:
    """Type of the frozen model's weights, as `strategies.model_dtype` has it."""
    return "float32" if config.model_dtype == "auto" and planned_device(config) == "cpu" else config.model_dtype


def own_memory() -> int:
    """Bytes of this process that are in memory now. Called once everything is imported, before any weights are there,
    it is what interpreter and libraries take."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def check_room(plan: TrainingPlan, output: Path) -> None:
    """Raises:
    InputError: the disk cannot hold the run's checkpoints."""
    remedy = f"Free some space, pass a smaller --keep ({plan.checkpoint_bytes:,} bytes each), or use another disk."
    check_disk(output, plan.disk_bytes, "output", remedy)

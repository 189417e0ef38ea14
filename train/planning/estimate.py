"""What a training will take, from its configuration alone: no weights are read.

A plan is made in three steps: the frozen model's sizes (config.json), the documents (an artefact's index, or an
assumption), and a dry run of the step with the largest of them, in which the training's own module runs on tensors
that have a shape and no numbers.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from draftsmith.data.features import INDEX_BYTES_PER_TOKEN
from draftsmith.data.store import feature_codec
from draftsmith.data.store.feature_codec import FeatureDtype
from draftsmith.data.store.files import check_disk
from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.data.store.shards import Rows
from draftsmith.data.text.answers import conversation_numbers
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.train.config import TrainConfig
from draftsmith.train.data_module import Order, order_of, train_and_val
from draftsmith.train.lit_head import LitHead
from draftsmith.train.planning.dry_run import BATCH, FROZEN, WEIGHTS, DryRun, HeldBytes, NotRehearsed, dry_step
from draftsmith.train.planning.memory import LAYOUTS, Layout, Memory, Strategy, memory
from draftsmith.train.planning.subjects import PlannedTraining, planned_training
from draftsmith.train.stored_tokens import LEAST_WEIGHT
from draftsmith.train.strategies import device_kind, world_size

# Of parts, only so many steps of an epoch are looked at for the largest.
STEPS_LOOKED_AT = 2000
# Of the tokens of documents that are not there yet.
ASSUMED_LOSS_SHARE = 0.6
# FLOPs of an epoch are those of so many of its documents, from the shortest to the longest.
COUNTED_DOCUMENTS = 32


@dataclass(frozen=True)
class TrainingDocuments:
    """The training samples: tokens of each, the share of them that the loss counts, and where that is from."""

    lengths: Sequence[int]
    loss_share: float
    source: str

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class TrainingPlan:
    """What a training takes. Bytes, elements, tokens and model FLOPs.

    part_tokens: most that a rank computes at once, padding included. memories: by layout, of one rank.
    checkpoint_bytes: of one; disk_bytes: most on the disk at a time. feature_bytes: dtype -> on disk; None where there
    are none. features_stored: they are there.
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
    part_tokens: int
    strategy: Layout
    memories: dict[Layout, Memory]
    checkpoint_bytes: int
    disk_bytes: int
    feature_bytes: dict[str, int] | None
    features_stored: bool

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch

    @property
    def own(self) -> Memory:
        """Memory of the configured strategy."""
        return self.memories[self.strategy]


def plan_of(config: TrainConfig, world: int = 0, samples: int = 60_000, length: int = 512) -> TrainingPlan:
    """The plan of a training, by its settings.

    world: ranks; 0 takes what a launcher has set, or the config's. samples, length: as of `training_documents`.

    Raises:
        InputError: a model that is none, or of a family that the head cannot take its layer from; or data that the
            training itself would refuse. NotRehearsed: a model whose code cannot run without numbers.
    """
    training = planned_training(config)
    documents = training_documents(config, training, samples, length)
    world = world or world_size(config)
    order = order_of(config, documents.lengths)
    largest, part_tokens = largest_part(order, documents.lengths, world * config.accumulate, training.packed)
    steps = config.max_steps or config.epochs * order.steps_per_epoch
    module, held, flops = rehearsed(config, training, documents, largest, steps)
    if getattr(config, "target_parallel", "none") == "tensor":
        held = dataclasses.replace(held, frozen=held.frozen // world, loading=held.loading // world)
    strategy = planned_strategy(config, world)
    shown = {key for key in LAYOUTS if key[0] != "one process" or world == 1} | {strategy}
    checkpoint = held.weights + held.optimizer
    return TrainingPlan(
        job=training.job,
        model=training.frozen.path,
        trained=sum(p.numel() for p in module.head.parameters() if p.requires_grad),
        frozen=training.frozen.params,
        documents=documents,
        world=world,
        steps_per_epoch=order.steps_per_epoch,
        steps=steps,
        step_flops=flops / order.steps_per_epoch,
        part_tokens=part_tokens,
        strategy=strategy,
        memories={key: memory(held, config.accumulate, key, world) for key in shown},
        checkpoint_bytes=checkpoint,
        # One more than are kept while the newest is written; best/, last/ and the one that replaces either.
        disk_bytes=(config.keep + 1) * checkpoint + 3 * held.weights,
        feature_bytes=feature_bytes(training.feature_size, documents.tokens) if training.feature_size else None,
        features_stored=training.stored,
    )


def rehearsed(
    config: TrainConfig, training: PlannedTraining, documents: TrainingDocuments, largest: Sequence[int], total: int
) -> tuple[LitHead, HeldBytes, float]:
    """The module after a dry run of its largest step, what it held, and FLOPs of an epoch.

    largest: tokens of the documents of the largest part. total: steps.
    """
    on_cpu, run = device_kind(config) == "cpu", DryRun()
    try:
        with torch.random.fork_rng(devices=[]), run:
            model, frozen, loading = training.frozen.loaded(run, on_cpu, config.engine)
            read = run.now[FROZEN]
            with run.making(WEIGHTS):
                head = training.head()
            with run.making(FROZEN):
                module = LitHead(head, training.objective(model), config, total)
            with run.making(BATCH):
                part = training.part(largest, documents.loss_share)
            optimizer = dry_step(run, module, part, largest, config.accumulate > 1, not on_cpu)
            batch, peaks = run.now[BATCH], dict(run.peaks)  # which what follows would raise
            flops = epoch_flops(config, training, module, documents)
    except RuntimeError as error:  # torch's, of an operator that needs numbers, or has no fake form
        found = f"{training.frozen.path}, whose code goes by numbers ({str(error).partition(chr(10))[0][:200]})"
        raise NotRehearsed("model", found, "one that runs without weights", "Train it without a plan.") from error
    weights = sum(parameter.nbytes for parameter in head.parameters() if parameter.requires_grad)
    # Tables of the head, and a frozen head that drafts.
    frozen += run.now[FROZEN] - read + run.now[WEIGHTS] - weights
    # Of a GPU's libraries nothing is known, nor does torch count them.
    libraries = own_memory() if on_cpu else 0
    return module, HeldBytes(libraries, frozen, loading, weights, optimizer, batch, peaks), flops


def epoch_flops(config: TrainConfig, training: PlannedTraining, module: LitHead, documents: TrainingDocuments) -> float:
    """FLOPs of an epoch at the end of a training, when all of its passes run; on average over its epochs."""
    apart = -(-len(documents.lengths) // COUNTED_DOCUMENTS)
    lengths = sorted(documents.lengths)[apart // 2 :: apart]
    step = TrainStep(module.total_steps, module.total_steps, lengths, ())

    def flops(stored: bool | None = None) -> float:
        part = training.part(lengths, documents.loss_share, stored)
        part = dataclasses.replace(part, tokens=training.loss_tokens(part.data))
        return module.objective.flops(module.head, part, step)

    counted = flops()
    if getattr(config, "features", "online") == "cache":  # filled in the first epoch and read in the others
        read = flops(stored=True)
        epochs = module.total_steps / order_of(config, documents.lengths).steps_per_epoch
        counted = read + (counted - read) * min(1.0, 1 / epochs)
    return counted * documents.tokens / sum(lengths)


class _Texts:
    """A data set of which only lengths and conversations are known."""

    manifest = None

    def __init__(self, lengths: Sequence[int] | np.ndarray, conversations: np.ndarray):
        self.lengths, self.conversations = lengths, conversations

    def __len__(self) -> int:
        return len(self.lengths)


def training_documents(config: TrainConfig, training: PlannedTraining, samples: int, length: int) -> TrainingDocuments:
    """The training samples of the artefact, split at the context where they are longer, and without held-out ones.

    samples, length: what is assumed where there is no artefact.
    """
    directory = config.data
    if (directory / MANIFEST).exists():
        texts, share = _read(directory)
        said = str(directory)
    else:
        texts, share = _Texts([length] * samples, np.arange(samples)), ASSUMED_LOSS_SHARE
        said = f"assumed: {samples:,} samples of {length} tokens, as {directory} is not there"
    val = None if config.val is None else texts
    train, _ = train_and_val(config, texts, val, training.context, training.lookahead, told=False)
    return TrainingDocuments(training.documents(train.lengths.tolist()), share, said)


def has_texts(directory: Path) -> bool:
    """True for a complete artefact whose rows have tokens and answers: what a training reads."""
    return (directory / MANIFEST).exists() and "input_ids" in {field.name for field in Manifest.read(directory).fields}


def _read(directory: Path) -> tuple[_Texts, float]:
    """The rows of an artefact, and the share of all tokens that a loss counts."""
    manifest = Manifest.read(directory)
    column = {"features": "length", "rollouts": "reached"}.get(manifest.kind, "input_ids")
    turns = ["turn"] if "turn" in {spec.name for spec in manifest.fields} else []
    parts, begins = [], []
    for table in Rows(directory, manifest, [column, *turns]).tables():
        parts.append(_tokens(table[column]))
        begins.append(table["turn"].to_numpy() if turns else np.ones(table.num_rows, dtype=np.int64))
    lengths, own = np.concatenate(parts), conversation_numbers(np.concatenate(begins))
    counts = {} if column == "reached" else manifest.counts
    named = (name for name in ("loss_tokens", "response_tokens", "drafted_tokens") if name in counts)
    total = int(lengths.sum())
    return _Texts(lengths, own), counts.get(next(named, ""), total) / max(1, total)


def _tokens(column: pa.ChunkedArray) -> np.ndarray:
    """Tokens of each row, by its length, its tokens, or how often rounds reach them: only those are kept."""
    if not pa.types.is_list(column.type):
        return column.to_numpy()
    if pa.types.is_integer(column.type.value_type):
        return pc.list_value_length(column).to_numpy()
    return np.array([int((np.asarray(row) >= LEAST_WEIGHT).sum()) for row in column.to_pylist()], dtype=np.int64)


def largest_part(order: Order, lengths: Sequence[int], shares: int, packed: bool) -> tuple[list[int], int]:
    """Tokens of the documents that a rank computes at once where these are most, over the steps of the first epoch; and
    of all of them, with their padding.

    shares: ranks times accumulated parts, over which a step's samples are dealt out in turn. packed: without padding.
    """
    best, most = list[int](), -1
    for step in range(min(order.steps_per_epoch, STEPS_LOOKED_AT)):
        _, batch = order.step(step)
        for slot in range(min(shares, len(batch))):
            own = [lengths[i] for i in batch[slot::shares]]
            tokens = sum(own) if packed else max(own) * len(own)
            if tokens > most:
                best, most = own, tokens
    return best, most


def planned_strategy(config: TrainConfig, world: int) -> Layout:
    name = str(config.strategy)
    if name == "auto":
        return ("ddp" if world > 1 else "one process"), False
    return cast(Strategy, name.removesuffix("_offload")), name.endswith("_offload")


def feature_bytes(size: int, tokens: int) -> dict[str, int]:
    """Bytes on disk, with their index. size: elements of a token's."""
    dtypes: tuple[FeatureDtype, ...] = ("bf16", "fp8")
    return {dtype: tokens * (feature_codec.token_bytes(size, dtype) + INDEX_BYTES_PER_TOKEN) for dtype in dtypes}


def own_memory() -> int:
    """Bytes of this process that are in memory now. Called once everything is imported, before any weights are there,
    it is what interpreter and libraries take."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def check_room(plan: TrainingPlan, output: Path) -> None:
    """Raises:
    InputError: the disk cannot hold the run's checkpoints."""
    remedy = f"Free some space, pass a smaller --keep ({plan.checkpoint_bytes:,} bytes each), or use another disk."
    check_disk(output, plan.disk_bytes, "output", remedy)

"""`draftsmith plan`: memory, disk, steps and FLOPs of a training before it runs.

Parameters come from config.json: modules are built on torch's meta device and no weights are read. Documents come from
the artefact's index, or from an assumption. ZeRO's formulas (Rajbhandari et al. 2020, section 5) share weights,
gradients and optimizer state out over the ranks. Activations are estimated from the head's layers; with --measure they,
and the time, come from a few real steps on this machine.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from draftsmith.data.console import Column, Table, add_result, print_facts, print_table, print_text
from draftsmith.data.engines.own import set_threads
from draftsmith.data.features import INDEX_BYTES_PER_TOKEN
from draftsmith.data.heads.directory import class_of, head_settings, kind_at
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.loading import DTYPES, read_config, target_shape
from draftsmith.data.store import feature_codec
from draftsmith.data.store.datasets import cut_lengths, open_dataset
from draftsmith.data.store.feature_codec import FeatureDtype
from draftsmith.data.store.files import check_disk
from draftsmith.data.store.manifest import MANIFEST, Manifest, volatile
from draftsmith.modules import flops
from draftsmith.modules.acceptance.head import AcceptanceHead, acceptance_training
from draftsmith.modules.drafters.base import TrainingCost, TrainStep
from draftsmith.modules.layers import LlamaConfig, LlamaModel
from draftsmith.modules.losses import CHUNK_ELEMENTS
from draftsmith.modules.targets.llama import SUPPORTED, llama_config
from draftsmith.modules.types import InputError, at_least, at_most
from draftsmith.train.acceptance import (
    TrainAcceptanceConfig,
    acceptance_settings,
    check_labels,
    labels_of,
    with_defaults,
)
from draftsmith.train.config import MOST, TrainConfig, TrainDrafterConfig, drafter_config
from draftsmith.train.prepare import head_config, prepare
from draftsmith.train.strategies import (
    device_kind,
    model_dtype,
    settled,
    tensor_cores,
    trainer_arguments,
    world_size,
)

if TYPE_CHECKING:
    from draftsmith.train.data_module import HeadDataModule
    from draftsmith.train.lit_head import LitHead

FLOAT32 = 4
# The largest part is looked for in this many steps of the first epoch.
STEPS_LOOKED_AT = 2000
# Share of the tokens that the loss counts, of an artefact that does not exist yet.
ASSUMED_LOSS_SHARE = 0.6
# FLOPs of an epoch are extrapolated from this many of its documents, from the shortest to the longest.
COUNTED_DOCUMENTS = 32
# float32 tensors the size of a chunk of logits that a loss holds at once: both models' logits, and their softmax.
CHUNK_TENSORS = 4
# A frozen layer's hidden states, projections and attention output, in multiples of its hidden size.
FROZEN_WIDTHS = 8
# Ids, places, masks of a token.
BATCH_BYTES = 32
WARM_UP, TIMED = 3, 5
# Layouts that the table compares: (strategy, offload to host memory) -> column title.
LAYOUTS: dict[tuple[str, bool], str] = {
    ("one process", False): "alone",
    ("ddp", False): "ddp",
    ("deepspeed_stage_1", False): "zero-1",
    ("deepspeed_stage_2", False): "zero-2",
    ("deepspeed_stage_3", False): "zero-3",
    ("deepspeed_stage_2", True): "z2-off",
    ("deepspeed_stage_3", True): "z3-off",
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of planning, beside those of the training.

    Attributes:
        data: The artefact to train on; its size is assumed if it does not exist yet.
        output: Where the training would write.
        world: Ranks to plan for, on all machines together; 0 takes what a launcher has set, or --devices.
        measure: Run a few real steps here; plan memory from their peak and tell how long the training takes.
        assume_samples: Samples, if the artefact does not exist yet.
        assume_length: Tokens of each of these samples.
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
    """Return the config class of `plan KIND`: the options of `train KIND` and `PlanOptions`."""
    about = f"Plan `train {kind}`: memory by part and strategy, disk, steps, FLOPs."
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
    """Plan `train acceptance`: memory by part and strategy, disk, steps, FLOPs."""


@dataclass(frozen=True)
class FrozenSizes:
    """Sizes of a frozen model, from its config.json.

    llama: None for a family that only transformers runs. params: tied weights count once. tables: bytes of buffers.
    """

    llama: LlamaConfig | None
    params: int
    tables: int
    hidden_size: int
    vocab_size: int
    num_layers: int
    intermediate_size: int
    max_position: int
    dtype: torch.dtype


def frozen_sizes(path: str, dtype: str) -> FrozenSizes:
    """Read a model's sizes from its config.json.

    dtype: float32, bfloat16, or auto for the checkpoint's own.

    Raises:
        InputError: no such model, or a config that neither we nor transformers can build a model from.
    """
    raw = read_config(path)
    stored = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    width = DTYPES.get(stored, torch.float32) if dtype == "auto" else DTYPES[dtype]
    llama: LlamaConfig | None = None
    if raw.get("model_type") in SUPPORTED:
        llama = config = llama_config(raw)
        with torch.device("meta"):
            model: nn.Module = LlamaModel(llama)
        num_layers, context = llama.num_layers, llama.max_position
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            whole = AutoConfig.from_pretrained(str(model_directory(path)))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(whole, dtype=width)
        except (ValueError, KeyError, OSError) as error:
            found = f"{path} ({raw.get('model_type')}: {str(error).splitlines()[0]})"
            remedy = "Only models that transformers knows by their config.json can be planned."
            raise InputError("model", found, "a causal language model", remedy) from error
        config = whole.get_text_config()
        num_layers, context = config.num_hidden_layers, getattr(config, "max_position_embeddings", None) or 2048
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    # `parameters` yields tied weights once.
    params, tables = sum(p.numel() for p in model.parameters()), sum(b.nbytes for b in model.buffers())
    sizes = (config.hidden_size, config.vocab_size, num_layers, inner, context)
    return FrozenSizes(llama, params, tables, *sizes, width)


@dataclass(frozen=True)
class PlannedHead:
    """A head on the meta device, and the way its training reads documents.

    context: longer documents are split into pieces that share `lookahead` tokens. packed: without padding. passes:
    reads of a batch that one graph holds. counted: share of the answers' tokens that the loss counts. feature_size:
    elements of a token's features, 0 without. stored: features come with the data. reads: the frozen model runs in
    every step. frozen_extra: parameters of a frozen head that drafts. stored_token: bytes of a drafted token in memory.
    """

    job: str
    path: str
    head: nn.Module
    frozen: FrozenSizes
    context: int
    lookahead: int = 0
    packed: bool = False
    passes: int = 1
    counted: float = 1.0
    feature_size: int = 0
    stored: bool = False
    reads: bool = True
    frozen_extra: int = 0
    stored_token: int = 0


def planned_head(config: TrainConfig) -> PlannedHead:
    """Build the head of a training on the meta device.

    Raises:
        InputError: no such model, or one of a family that the head cannot take its layer from.
    """
    if isinstance(config, TrainDrafterConfig):
        drafter, frozen = config.drafter, frozen_sizes(config.target, model_dtype(config))
        shape = head_config(config, frozen.llama or target_shape(config.target))
        with torch.device("meta"):
            head: nn.Module = drafter(shape)
        head.freeze(config)  # type: ignore[operator]  # a DraftHead
        # Layers whose states are the features.
        captured = drafter.learns_from(shape, frozen.num_layers)
        stored = (config.data / MANIFEST).exists() and Manifest.read(config.data).kind == "features"
        return PlannedHead(
            job=config.kind,
            path=config.target,
            head=head,
            frozen=frozen,
            # A head to fine-tune may reach less far than its target.
            context=min(frozen.max_position, shape.max_position),
            lookahead=drafter.lookahead,
            packed=bool(config.tokens_per_batch),
            passes=getattr(config, "unroll", getattr(config, "passes", 1)),
            feature_size=frozen.hidden_size * max(1, len(captured)) if drafter.needs_features else 0,
            stored=stored,
            reads=drafter.needs_features and not stored,
        )
    assert isinstance(config, TrainAcceptanceConfig)
    # An acceptance head reads the states of a frozen drafter.
    config, frozen = with_defaults(config), frozen_sizes(config.read_model, model_dtype(config))
    labels, manifest = labels_of(config)
    settings, rollouts = acceptance_settings(config, frozen.hidden_size), labels == "rollouts"
    if manifest is not None:
        check_labels(settings, manifest)
    with torch.device("meta"):
        head, kind = AcceptanceHead(settings), kind_at(config.drafter)
        drafting = None if kind is None else class_of(kind)(head_settings(config.drafter, kind))
    return PlannedHead(
        job="acceptance",
        path=config.read_model,
        head=head,
        frozen=frozen,
        # Rollouts are not split: their drafts follow all of a text. They are read before the first step.
        context=sys.maxsize if rollouts else frozen.max_position,
        packed=rollouts,
        counted=1 - (config.mix or 0),
        reads=not rollouts,
        frozen_extra=0 if drafting is None else sum(p.numel() for p in drafting.parameters()),
        stored_token=frozen.hidden_size * frozen.dtype.itemsize + 64 if rollouts else 0,
    )


@dataclass(frozen=True)
class TrainingDocuments:
    """Tokens of each training sample, the share of them that the loss counts, and where these numbers come from."""

    lengths: Sequence[int]
    loss_share: float
    source: str


@dataclass(frozen=True)
class _AssumedTexts:
    """Stand-in for a data set that does not exist yet."""

    lengths: np.ndarray
    conversations: np.ndarray
    manifest: Manifest | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def in_pieces(self, max_length: int, overlap: int = 0) -> _AssumedTexts:
        pieces, _, lengths = cut_lengths(self.lengths, max_length, overlap)
        return _AssumedTexts(lengths, self.conversations[pieces])


def training_documents(
    config: TrainConfig, context: int, lookahead: int, samples: int = 0, length: int = 0
) -> TrainingDocuments:
    """Read the lengths of the training samples: split at the context, without held-out ones.

    samples, length: assumed if the artefact does not exist.
    """
    from draftsmith.train.acceptance_data import BLOCK, LEAST_WEIGHT
    from draftsmith.train.data_module import train_and_val

    # Without an artefact its size is assumed.
    texts: Any = _AssumedTexts(np.full(samples, length), np.arange(samples))
    source = f"assumed: {samples:,} samples of {length} tokens, as {config.data} does not exist"
    rollouts, share = False, ASSUMED_LOSS_SHARE
    if (config.data / MANIFEST).exists():
        manifest, source = Manifest.read(config.data), str(config.data)
        texts, rollouts = open_dataset(config.data, check="size"), manifest.kind == "rollouts"
        named = (name for name in ("loss_tokens", "response_tokens", "drafted_tokens") if name in manifest.counts)
        total = int(texts.lengths.sum())
        share = 1.0 if rollouts else manifest.counts.get(next(named, ""), total) / max(1, total)
    val = None if config.val is None else texts
    train, _ = train_and_val(config, texts, val, context, lookahead, log=False)
    lengths = [int(tokens) for tokens in train.lengths]
    # Samples are blocks of drafted tokens, from all answers.
    if rollouts:
        weights = (texts.item(int(row), 0)["weight"] for row in train.indices)
        blocks, left = divmod(sum(int((weight >= LEAST_WEIGHT).sum()) for weight in weights), BLOCK)
        lengths = [BLOCK] * blocks + [left] * (left > 0)
    return TrainingDocuments(lengths, share, source)


def epoch_flops(config: TrainConfig, planned: PlannedHead, documents: TrainingDocuments, epochs: float) -> float:
    """Return the FLOPs of an epoch at the end of the training, when all passes run."""
    apart = -(-len(documents.lengths) // COUNTED_DOCUMENTS)
    lengths = sorted(documents.lengths)[apart // 2 :: apart]
    count = sum(round(length * documents.loss_share * planned.counted) for length in lengths)
    head: Any = planned.head
    if isinstance(config, TrainDrafterConfig):
        step = TrainStep(MOST, MOST, lengths, ())
        total = head.flops(head.config, config, step, count) if issubclass(config.drafter, TrainingCost) else 0.0
    else:
        total = acceptance_training(head.config, count)
    if planned.reads:
        frozen, tokens = planned.frozen, sum(lengths)
        others = frozen.params - frozen.vocab_size * frozen.hidden_size
        # Two FLOPs per parameter and token, for a family without a formula.
        forward = flops.layers_forward(frozen.llama, lengths) if frozen.llama else 2.0 * others * tokens
        # A feature cache is filled in the first epoch and read in the others.
        cached = getattr(config, "features", "online") == "cache"
        total += forward * (min(1.0, 1 / epochs) if cached else 1.0)
    return total * sum(documents.lengths) / sum(lengths)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by part, and their peak. host: bytes that offloading keeps in the CPU's memory."""

    parts: dict[str, int]
    peak: int
    host: int = 0


def process_bytes(
    config: TrainConfig, planned: PlannedHead, documents: TrainingDocuments, part_tokens: int
) -> dict[str, int]:
    """Return the bytes of a training by part, in one process without a strategy. part_tokens: most computed at once."""
    head, frozen, on_gpu = planned.head, planned.frozen, device_kind(config) == "gpu"
    trained = [p for p in head.parameters() if p.requires_grad]
    weights = FLOAT32 * sum(p.numel() for p in trained)
    # Muon keeps one average of a matrix, AdamW two of everything.
    saved = FLOAT32 * sum(p.numel() for p in trained if p.ndim >= 2) if config.optimizer == "muon" else 0
    stored = part_tokens * planned.feature_size * 2 if planned.stored else 0
    statm = Path("/proc/self/statm")
    return {
        # Interpreter and libraries, which on a CPU are most of a small training.
        "libraries": 0 if on_gpu else int(statm.read_text().split()[1]) * resource.getpagesize(),
        "frozen": (frozen.params + planned.frozen_extra) * frozen.dtype.itemsize
        + frozen.tables
        + sum(buffer.nbytes for buffer in head.buffers())
        + sum(p.nbytes for p in head.parameters() if not p.requires_grad)
        + planned.stored_token * sum(documents.lengths),
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights - saved,
        # All parts of a step are in memory together, and the samples that the next one is made of.
        "batch": (config.accumulate + 1) * (part_tokens * BATCH_BYTES + stored),
        # Activations are gone before the optimizer steps. On a GPU it steps all tensors at once, with temporaries.
        "activations": max(
            weights if on_gpu else 0, activation_bytes(config, planned, part_tokens, documents.loss_share)
        ),
    }


def activation_bytes(config: TrainConfig, planned: PlannedHead, tokens: int, loss_share: float) -> int:
    """Estimate what forward and backward over so many tokens hold beside weights and gradients.

    Autograd keeps the input of every linear layer and what the next operator reads of its output; norms keep their
    input and normalised output in float32. Logits are made and freed in chunks, so an lm_head of the head's own counts
    as chunks. The frozen model keeps nothing but its features.
    """
    frozen, width = planned.frozen, 2 if config.precision == "bf16" else FLOAT32
    kept, vocab = 0, frozen.vocab_size
    for module in planned.head.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and module.out_features > 8 * module.in_features:
            vocab = module.out_features
        elif isinstance(module, nn.Linear):
            kept += width * (module.in_features + module.out_features)
        elif isinstance(weight, nn.Parameter) and weight.ndim == 1:
            kept += 2 * FLOAT32 * weight.numel()
    total = planned.passes * tokens * kept
    if isinstance(config, TrainDrafterConfig):
        total += CHUNK_TENSORS * FLOAT32 * min(CHUNK_ELEMENTS, round(tokens * loss_share) * vocab)
        # Features as they came, and in the head's type.
        total += tokens * planned.feature_size * (frozen.dtype.itemsize + width)
    working = tokens * frozen.dtype.itemsize * (FROZEN_WIDTHS * frozen.hidden_size + 3 * frozen.intermediate_size)
    return max(total, working if planned.reads else 0)


def rank_memory(process: dict[str, int], layout: tuple[str, bool], world: int) -> RankMemory:
    """Return the memory of one rank under a layout, from that of one process.

    DDP reduces gradients in buckets as large as themselves. Stages 1 and 2 keep every weight, and a rank's part of a
    second copy that the optimizer steps; stage 2 keeps a rank's part of the gradients; stage 3 of the weights too,
    which it gathers for forward and backward. All of them reduce gradients a bucket at a time.
    """
    (strategy, offload), parts, host = layout, dict(process), 0
    whole = process["weights"]
    if strategy == "ddp":
        parts["gradients"] += whole
    elif strategy.startswith("deepspeed"):
        from draftsmith.train.deepspeed import BUCKET

        stage, part = int(strategy[-1]), FLOAT32 * -(-whole // FLOAT32 // world)
        parts["optimizer"] = part + -(-process["optimizer"] // world)
        parts["gradients"] = (whole if stage == 1 else part) + min(whole, FLOAT32 * BUCKET)
        # Its part, and what it gathers.
        parts["weights"] = part + whole if stage == 3 else whole
        if offload:
            host, parts["optimizer"] = part + parts["optimizer"], 0
    return RankMemory(parts, sum(parts.values()), host)


def planned_layout(config: TrainConfig, world: int) -> tuple[str, bool]:
    """Return strategy and offload of a training; `auto` is DDP on several ranks."""
    name = str(config.strategy)
    if name == "auto":
        return ("ddp" if world > 1 else "one process"), False
    return name.removesuffix("_offload"), name.endswith("_offload")


@dataclass(frozen=True)
class TrainingPlan:
    """Costs of a training, in bytes, elements, tokens and model FLOPs.

    part_tokens: most that a rank computes at once, padding included. process: bytes by part in one process; memories:
    of one rank, by layout. disk_bytes: most on the disk at a time. feature_bytes: dtype -> bytes on disk, None for
    heads that read no features. features_stored: the data has them.
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
    strategy: tuple[str, bool]
    process: dict[str, int]
    memories: dict[tuple[str, bool], RankMemory]
    checkpoint_bytes: int
    disk_bytes: int
    feature_bytes: dict[str, int] | None
    features_stored: bool

    @property
    def own(self) -> RankMemory:
        """Memory under the configured strategy."""
        return self.memories[self.strategy]


def plan_of(config: TrainConfig, world: int = 0, samples: int = 60_000, length: int = 512) -> TrainingPlan:
    """Plan a training.

    world: ranks; 0 takes what a launcher has set, or the config's. samples, length: as in `training_documents`.

    Raises:
        InputError: no such model, or one of a family that the head cannot take its layer from; or data that the
            training itself would refuse.
    """
    from draftsmith.train.data_module import order_of

    planned = planned_head(config)
    documents = training_documents(config, planned.context, planned.lookahead, samples, length)
    world = world or world_size(config)
    # Steps, as the training's own order makes them.
    order = order_of(config, documents.lengths)
    steps = config.max_steps or config.epochs * order.steps_per_epoch

    # The largest part of a rank: samples of a step are dealt out in turn to ranks and accumulated parts.
    part_tokens, shares = 0, world * config.accumulate
    for step in range(min(order.steps_per_epoch, STEPS_LOOKED_AT)):
        _, batch = order.step(step)
        for share in range(min(shares, len(batch))):
            part = [documents.lengths[i] for i in batch[share::shares]]
            part_tokens = max(part_tokens, sum(part) if planned.packed else max(part) * len(part))

    # Memory of a rank under each strategy.
    process = process_bytes(config, planned, documents, part_tokens)
    if getattr(config, "target_parallel", "none") == "tensor":
        process["frozen"] //= world
    layout = planned_layout(config, world)
    shown = {key for key in LAYOUTS if key[0] != "one process" or world == 1} | {layout}
    checkpoint, tokens = process["weights"] + process["optimizer"], sum(documents.lengths)
    # Bytes on disk.
    dtypes: tuple[FeatureDtype, ...] = ("bf16", "fp8") if planned.feature_size else ()
    features = {d: feature_codec.token_bytes(planned.feature_size, d) + INDEX_BYTES_PER_TOKEN for d in dtypes}
    epoch = epoch_flops(config, planned, documents, steps / order.steps_per_epoch)
    return TrainingPlan(
        job=planned.job,
        model=planned.path,
        trained=process["weights"] // FLOAT32,
        frozen=planned.frozen.params,
        documents=documents,
        world=world,
        steps_per_epoch=order.steps_per_epoch,
        steps=steps,
        step_flops=epoch / order.steps_per_epoch,
        part_tokens=part_tokens,
        strategy=layout,
        process=process,
        memories={key: rank_memory(process, key, world) for key in shown},
        checkpoint_bytes=checkpoint,
        # `keep` checkpoints and the one being written; best/, last/ and the one that replaces either.
        disk_bytes=(config.keep + 1) * checkpoint + 3 * process["weights"],
        feature_bytes={dtype: tokens * size for dtype, size in features.items()} or None,
        features_stored=planned.stored,
    )


@dataclass(frozen=True)
class MeasuredSteps:
    """Real steps of a training. flops_per_s: model FLOPs over time on one rank. tokens_per_s: of one rank. peak_bytes:
    of this process, models and libraries included. part_tokens: most that were computed at once."""

    steps: int
    flops_per_s: float
    tokens_per_s: float
    peak_bytes: int
    part_tokens: int


def measure_steps(config: TrainConfig) -> MeasuredSteps:
    """Train for a few steps on the first batches, in a temporary directory.

    Raises:
        InputError: as the training itself, or the data does not exist yet.
    """
    from draftsmith.train.metrics import num_ranks

    if not (config.data / MANIFEST).exists():
        remedy = "Make it (a few rows will do), or leave --measure out."
        raise InputError("data", f"no artefact at {config.data}", "data to measure a training on", remedy)
    with tempfile.TemporaryDirectory(prefix="draftsmith-plan-") as folder:
        # The training as configured, but short, and without tracking or decoding.
        changes: dict[str, Any] = {"output": Path(folder) / "run", "max_steps": WARM_UP + TIMED}
        changes |= {"resume": False, "wandb": "off"}
        if isinstance(config, TrainDrafterConfig):
            changes |= {"tau_prompts": 0, "feature_cache": None}
        short_config: Any = dataclasses.replace(config, **changes)
        training = prepare(short_config)
        numbers = timed_steps(training.module, training.data, short_config, folder)
    return MeasuredSteps(
        TIMED,
        numbers.get("mfu", 0.0),
        numbers["tokens_per_s"] / num_ranks(),
        int(numbers["memory_gb"] * 1e9),
        int(numbers["part_tokens"]),
    )


def timed_steps(module: LitHead, data: HeadDataModule, config: TrainConfig, folder: str | Path) -> dict[str, float]:
    """Run WARM_UP + TIMED steps, which are all of the training's. Return `Telemetry.take` of the timed ones, its mfu as
    FLOP/s, and part_tokens. folder: for what Lightning may leave."""
    import lightning.pytorch as pl

    from draftsmith.train.fit import quiet
    from draftsmith.train.telemetry import Telemetry, num_slots

    # With a peak of 1 the utilisation is FLOP/s.
    telemetry = Telemetry(peak=1.0)
    numbers: dict[str, float] = {}
    most = 0

    class Timing(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
            nonlocal most
            most = max(most, num_slots(batch))
            if batch.last and trainer.global_step in (WARM_UP, trainer.max_steps):
                if pl_module.device.type == "cuda":
                    torch.cuda.synchronize(pl_module.device)
                numbers.update(telemetry.take(pl_module.device))

    with quiet(), tensor_cores(config):
        trainer = pl.Trainer(
            **trainer_arguments(config),
            max_steps=WARM_UP + TIMED,
            logger=False,
            callbacks=[telemetry, Timing()],
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=data)
    return numbers | {"part_tokens": most}


def run(config: Any) -> None:
    """Print the plan."""
    set_threads(config.num_threads)
    config = settled(config)
    plan, measured = plan_of(config, config.world, config.assume_samples, config.assume_length), None
    if config.measure:
        measured, here = measure_steps(config), world_size(config)
        # What the steps held beside what does not depend on their size, by tokens.
        memory = rank_memory(plan.process, planned_layout(config, here), here)
        activations = max(0, measured.peak_bytes - memory.peak + memory.parts["activations"])
        process = {**plan.process, "activations": activations * plan.part_tokens // measured.part_tokens}
        memories = {key: rank_memory(process, key, plan.world) for key in plan.memories}
        plan = dataclasses.replace(plan, process=process, memories=memories)
    print_facts(fact_rows(plan, config), f"{plan.job} head for {plan.model}, planned from its config.json")
    print_table(memory_table(plan), bold="peak")
    if measured is not None:
        # By FLOPs, since the timed documents may be short; by tokens for a head that does not count its FLOPs.
        if measured.flops_per_s:
            seconds = plan.step_flops * plan.steps / measured.flops_per_s
        else:
            seconds = sum(plan.documents.lengths) * plan.steps / plan.steps_per_epoch / measured.tokens_per_s
        hours = seconds / plan.world / 3600
        print_text(
            f"measured {measured.steps} steps: {measured.tokens_per_s:,.0f} tokens/s and "
            f"{measured.flops_per_s / 1e9:,.1f} GFLOP/s a rank, peak {measured.peak_bytes / 1e6:,.0f} MB; all "
            f"{plan.steps:,} steps would take {hours:.3g} hours, validation aside"
        )
    documents = plan.documents
    numbers = {
        **dataclasses.asdict(dataclasses.replace(plan, memories={})),
        "documents": {"source": documents.source, "samples": len(documents.lengths), "tokens": sum(documents.lengths)},
        "memories": {LAYOUTS[key]: dataclasses.asdict(value) for key, value in plan.memories.items()},
    }
    add_result(**numbers, measured=dataclasses.asdict(measured) if measured else None)


def announce(config: TrainConfig) -> None:
    """Print the short form at the start of a training, before any weights are read.

    Data that is missing, or that a training does not read, is left for the training to report.

    Raises:
        InputError: the disk cannot hold the checkpoints.
    """
    from draftsmith.train.metrics import say_on_rank_zero

    if not (config.data / MANIFEST).exists():
        return
    if "input_ids" not in {field.name for field in Manifest.read(config.data).fields}:
        return
    plan = plan_of(config)
    ranks = f"{plan.world} ranks" if plan.world > 1 else "1 rank"
    say_on_rank_zero(
        f"plan: {short(plan.trained).strip()} trained and {short(plan.frozen).strip()} frozen parameters, "
        f"about {short(plan.own.peak)}B of memory a rank ({ranks}, {LAYOUTS[plan.strategy]})\n"
        f"plan: {plan.steps:,} steps, {plan.steps_per_epoch:,} an epoch, {short(plan.step_flops)}FLOPs each; "
        f"checkpoints {short(plan.checkpoint_bytes)}B each, {short(plan.disk_bytes)}B at most"
    )
    remedy = f"Free some space, pass a smaller --keep ({plan.checkpoint_bytes:,} bytes each), or use another disk."
    check_disk(config.output, plan.disk_bytes, "output", remedy)


def fact_rows(plan: TrainingPlan, config: TrainConfig) -> dict[str, str]:
    """Return the lines above the memory table."""
    documents, tokens = plan.documents, sum(plan.documents.lengths)
    per_step = tokens / plan.steps_per_epoch
    rows = {
        "parameters": f"{short(plan.trained).strip()} trained, {short(plan.frozen).strip()} frozen",
        "data": f"{documents.source}: {len(documents.lengths):,} training samples, {tokens:,} tokens",
        "steps": f"{plan.steps:,} of {per_step:,.0f} tokens: {plan.steps / plan.steps_per_epoch:.3g} epochs of "
        f"{plan.steps_per_epoch:,} steps; {per_step * plan.steps:,.0f} tokens in all",
        "compute": f"{short(plan.step_flops)}FLOPs a step, {short(plan.step_flops * plan.steps)}FLOPs in all",
        "largest part": f"{plan.part_tokens:,} tokens on a rank at once "
        f"({plan.world} ranks, {config.accumulate} parts)",
        "checkpoints": f"{short(plan.checkpoint_bytes)}B each, float32 weights and averages; "
        f"{short(plan.disk_bytes)}B at most, with best/ and last/",
    }
    if plan.feature_bytes:
        there = "on disk" if plan.features_stored else "if stored"
        rows[f"features {there}"] = ", ".join(f"{short(v)}B in {k}" for k, v in plan.feature_bytes.items())
    return rows


def memory_table(plan: TrainingPlan) -> Table:
    """Return a table with a row per part and a column per layout."""
    # A column per layout, a row per part that any of them has.
    columns = [key for key in LAYOUTS if key in plan.memories]
    titles = [LAYOUTS[key] + ("*" if key == plan.strategy else "") for key in columns]
    memories = [plan.memories[key] for key in columns]
    unit, divisor, digits = ("GB", 1e9, 2) if plan.own.peak >= 1e10 else ("MB", 1e6, 0)
    lines = [(name, [memory.parts[name] for memory in memories], False) for name in plan.own.parts]
    lines += [("peak", [memory.peak for memory in memories], True)]
    lines += [("host memory", [memory.host for memory in memories], False)]
    rows = [
        {"part": name, **{t: f"{s / divisor:,.{digits}f}" for t, s in zip(titles, sizes, strict=True)}, "peak": bold}
        for name, sizes, bold in lines
        if any(sizes)
    ]
    title = f"Memory of a rank, {unit}; * as configured, off: with offload to host memory"
    return Table("memory", title, [Column("part", "part"), *(Column(name, name, ">") for name in titles)], rows)


def short(number: float) -> str:
    """Return 1234567 as `1.23 M`, to be followed by a unit or a noun."""
    for step, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= step:
            return f"{number / step:.3g} {letter}"
    return f"{number:,.0f} "

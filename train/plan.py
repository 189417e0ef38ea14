"""`draftsmith train KIND --plan`: memory, disk, steps, FLOPs and hours of a drafter's training before it runs.

Parameters come from config.json: modules are built on torch's meta device and no weights are read. Documents come from
the artifact's index, or from an assumption. ZeRO's formulas (Rajbhandari et al. 2020, section 5) share weights,
gradients and optimizer state out over the ranks. Activations are estimated from the head's layers. FLOPs are those that
torch counts in a step on the meta device.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.data.console import add_result, print_facts, print_text
from draftsmith.data.features import INDEX_BYTES_PER_TOKEN
from draftsmith.data.store.datasets import cut_lengths, open_dataset, pack_features
from draftsmith.data.store.feature_codec import token_bytes
from draftsmith.data.store.manifest import MANIFEST, Manifest
from draftsmith.modules.drafters.base import DocumentParts, DraftHead, TrainStep
from draftsmith.modules.drafters.block.head import BlockHead
from draftsmith.modules.engine.lean import MLP_ROWS
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.llama_config import LlamaConfig, layers_of
from draftsmith.modules.losses import row_chunks
from draftsmith.modules.pretrained.auto import auto_class, text_part
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.files import check_disk
from draftsmith.modules.pretrained.models import weight_type
from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.outer import OuterLM, OuterWeights
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError, describe_error
from draftsmith.train.config import MOST, NO_DATA, Strategy, TrainDrafterConfig
from draftsmith.train.data import Order, cut_spans
from draftsmith.train.features import TOKENS_READ, TOKENS_READ_ON_GPU
from draftsmith.train.optimizers import hidden_matrices
from draftsmith.train.prepare import head_config, needs_layers
from draftsmith.train.strategies import device_kind, process_memory, world_size

FLOAT32 = 4
# The largest part is looked for in this many steps of the first epoch.
STEPS_LOOKED_AT = 2000
# Samples of an artifact that does not exist yet, their tokens, and the share that the loss counts.
ASSUMED_SAMPLES, ASSUMED_TOKENS = 60_000, 512
ASSUMED_LOSS_SHARE = 0.6
# float32 tensors the size of a chunk of logits that a loss holds at once: both models' logits, and their softmax.
CHUNK_TENSORS = 4
# A frozen layer's hidden states, projections and attention output, in multiples of its hidden size.
FROZEN_WIDTHS = 7
# Ids, places, masks of a token.
BATCH_BYTES = 32
ALONE = "one process"


@dataclass(frozen=True)
class TrainingDocuments:
    """Tokens of each training sample, the share of them that the loss counts, and where these numbers come from."""

    lengths: Sequence[int]
    loss_share: float
    source: str


def training_documents(config: TrainDrafterConfig, context: int, num_lost_rows: int) -> TrainingDocuments:
    """Read the lengths of the training samples: split at the context, without held-out ones. Assume them if the
    artifact does not exist."""
    from draftsmith.train.data import train_and_val

    missing = [str(part.path) for part in config.parts if not (part.path / MANIFEST).exists()]
    if missing:
        samples, length = ASSUMED_SAMPLES, ASSUMED_TOKENS
        count = samples if config.val is not None else samples - max(1, round(config.val_share * samples))
        _, _, lengths = cut_lengths(np.full(count, length), min(config.max_length or context, context), num_lost_rows)
        source = f"assumed: {samples:,} samples of {length} tokens"
        source += "" if missing == [NO_DATA] else f", as {' and '.join(missing)} does not exist"
        return TrainingDocuments(lengths.tolist(), ASSUMED_LOSS_SHARE, source)

    texts = open_dataset(config.data, check="size")
    counts = texts.manifest.counts
    train, _ = train_and_val(config, texts, None if config.val is None else texts, context, num_lost_rows)
    total = int(texts.lengths.sum())
    share = counts.get("loss_tokens", counts.get("response_tokens", total)) / max(1, total)
    return TrainingDocuments(train.lengths.tolist(), share, " + ".join(map(str, config.parts)))


@dataclass(frozen=True)
class TrainingPlan:
    """Costs of a training, in bytes, elements, tokens and FLOPs.

    step_flops: None where they cannot be counted. part_tokens: most that a rank computes at once, padding included.
    process: memory by part, in one process without a strategy. disk_bytes: most on the disk at a time. feature_bytes:
    dtype -> bytes on disk, empty for heads that read no features.
    """

    trained: int
    frozen: int
    documents: TrainingDocuments
    world: int
    steps_per_epoch: int
    steps: int
    step_flops: float | None
    part_tokens: int
    strategy: str
    process: dict[str, int]
    checkpoint_bytes: int
    disk_bytes: int
    feature_bytes: dict[str, int]

    @property
    def memory(self) -> dict[str, int]:
        """Memory of a rank by part."""
        return rank_memory(self.process, self.strategy, self.world)

    @property
    def peak(self) -> int:
        return self.memory["peak"]


def meta_target(checkpoint: Checkpoint, outer: bool) -> nn.Module:
    """Build a target on the meta device, to count its weights. outer: only what surrounds its layers.

    Raises:
        InputError: an architecture that transformers does not have.
    """
    shape = checkpoint.shape
    with torch.device("meta"):
        if outer or not shape.reasons:
            return LlamaModel(layers_of(shape, num_layers=0) if outer else shape)
        try:
            config = checkpoint.known
            model = auto_class(config).from_config(config, trust_remote_code=checkpoint.trust_remote_code)
            target: nn.Module = text_part(model)
        except Exception as error:  # each family refuses in its own way
            remedy = "Plan with --server URL, which counts no layer of it."
            found = f"{checkpoint.path} ({describe_error(error)})"
            raise InputError("target", found, "a causal model that transformers builds", remedy) from error
        return target


def meta_head(config: TrainDrafterConfig, target: LlamaConfig) -> DraftHead:
    """Build the head of a training without weights."""
    with torch.device("meta"):
        head = config.drafter(head_config(config, target))
    head.freeze(config)
    return head


def saved_bytes(config: TrainDrafterConfig, head: DraftHead) -> tuple[int, int, int]:
    """Return the bytes of the trained weights, of a checkpoint, and the most that a training has on the disk."""
    trained = [p for p in head.parameters() if p.requires_grad]
    weights = FLOAT32 * sum(p.numel() for p in trained)
    # Muon keeps one average of a matrix, AdamW two of everything.
    matrices = hidden_matrices(head) if config.optimizer == "muon" else set()
    checkpoint = 3 * weights - FLOAT32 * sum(p.numel() for p in trained if p in matrices)
    # `keep` checkpoints and the one being written; best/, last/ and the one that replaces either.
    return weights, checkpoint, (config.keep + 1) * checkpoint + 3 * weights


def check_space(config: TrainDrafterConfig, target: LlamaConfig) -> None:
    """Check, before any weights are read, that the disk can hold what a training saves.

    Raises:
        InputError: it cannot.
    """
    _, checkpoint, needed = saved_bytes(config, meta_head(config, target))
    remedy = f"Free some space, pass a smaller --keep ({checkpoint:,} bytes each), or use another disk."
    check_disk(config.output, needed, "output", remedy)


def plan_of(
    config: TrainDrafterConfig, opened: Checkpoint | None = None, documents: TrainingDocuments | None = None
) -> TrainingPlan:
    """Plan a training. opened: its target, if that is open. documents: in place of those of `config.data`.

    Raises:
        InputError: no such model, or one of a family that the head cannot take its layer from; or data that the
            training itself would refuse.
    """
    drafter, world = config.drafter, world_size(config)
    # Target and head, without weights. Of a target elsewhere only the embeddings are here.
    files, served = opened or Checkpoint(config.target), config.server is not None
    shape, width = files.shape, weight_type(config.dtype, files, device_kind(config)).itemsize
    paths = [part.path for part in config.parts]
    stored = all((path / MANIFEST).exists() and Manifest.read(path).kind == "features" for path in paths)
    target = meta_target(files, served or (stored and not needs_layers(config)))
    head = meta_head(config, shape)
    head_shape: Any = head.config
    feature_size = shape.hidden_size * max(1, len(drafter.loss_layers(head_shape, shape.num_layers)))

    # Steps, as the training's own order makes them. A head to fine-tune may reach less far than its target. With
    # --minutes the number of steps is unknown: plan one epoch.
    context = min(shape.max_position, head_shape.max_position)
    documents = documents or training_documents(config, context, drafter.num_lost_rows)
    order = Order(documents.lengths, config.seed, config.batch_size, config.tokens_per_batch)
    steps = order.steps_per_epoch if config.minutes else config.num_steps(order.steps_per_epoch)

    # The largest part of a rank: samples of a step are dealt out in turn to ranks and accumulated parts. It is packed
    # end to end, or padded to the longest.
    largest: list[int] = [0]
    shares = world * config.accumulate
    for step in range(min(order.steps_per_epoch, STEPS_LOOKED_AT)):
        _, batch = order.step(step)
        for share in range(min(shares, len(batch))):
            part = [int(documents.lengths[i]) for i in batch[share::shares]]
            part = part if config.tokens_per_batch else [max(part)] * len(part)
            largest = max(largest, part, key=lambda own: (sum(own), max(own)))
    part_tokens = sum(largest)

    # Memory of a rank, and a step's FLOPs.
    read_in_step = feature_size > 0 and not stored and not served
    process = process_bytes(config, target, width, shape, head, documents, largest, feature_size, read_in_step)
    strategy = str(config.strategy)
    if strategy == "auto":
        strategy = "ddp" if world > 1 else ALONE
    tokens = sum(documents.lengths)
    text_flops = count_flops(config, shape, head, documents, feature_size, read_in_step)
    step_flops = text_flops and text_flops * len(documents.lengths) / order.steps_per_epoch

    _, checkpoint, disk_bytes = saved_bytes(config, head)
    per_token = {dtype: token_bytes(feature_size, dtype) + INDEX_BYTES_PER_TOKEN for dtype in ("bf16", "fp8")}
    return TrainingPlan(
        trained=process["weights"] // FLOAT32,
        frozen=sum(p.numel() for p in target.parameters()),
        documents=documents,
        world=world,
        steps_per_epoch=order.steps_per_epoch,
        steps=steps,
        step_flops=step_flops,
        part_tokens=part_tokens,
        strategy=strategy,
        process=process,
        checkpoint_bytes=checkpoint,
        disk_bytes=disk_bytes,
        feature_bytes={dtype: tokens * size for dtype, size in per_token.items()} if feature_size else {},
    )


def count_flops(
    config: TrainDrafterConfig,
    shape: LlamaConfig,
    head: DraftHead,
    documents: TrainingDocuments,
    feature_size: int,
    read_in_step: bool,
) -> float | None:
    """Count the FLOPs of loss and gradient of a text of the mean length; None if the loss has to see its numbers.

    Arguments as of `process_bytes`.
    """
    length = round(sum(documents.lengths) / len(documents.lengths))
    ids, begin = torch.zeros(length, dtype=torch.int64), round((1 - documents.loss_share) * length)
    text: Any = pack_features([{"input_ids": ids, "loss_mask": torch.arange(length) >= begin}])
    rows, count = head.logit_rows(text, config), head.loss_count(text, config)
    step = TrainStep(MOST, MOST, [length], [0], feature_std=0.0, logged=False, logit_rows=rows, loss_count=count)
    # The host places the blocks of a block drafter.
    on_host = {"loss_mask"} if isinstance(head, BlockHead) else set()
    tensors = {name: value for name, value in vars(text).items() if isinstance(value, Tensor) and name not in on_host}
    moved = {name: torch.empty_like(value, device="meta") for name, value in tensors.items()}
    batch = dataclasses.replace(text, **moved, features=torch.empty(1, length, feature_size, device="meta"))
    weight = torch.empty(shape.vocab_size, shape.hidden_size, device="meta")
    info = ModelInfo(shape.hidden_size, shape.vocab_size, shape.num_layers, shape.max_position, (), {})
    target = OuterLM(OuterWeights(weight, weight), info, Readout())
    try:
        with FlopCounterMode(display=False) as counter:
            if read_in_step:
                with torch.device("meta"), torch.no_grad():
                    LlamaModel(shape).features(batch.input_ids)
            head.loss(batch, target, config, step).loss.backward()
    except RuntimeError:
        return None
    return float(counter.get_total_flops())


def process_bytes(
    config: TrainDrafterConfig,
    target: nn.Module,
    width: int,
    shape: LlamaConfig,
    head: DraftHead,
    documents: TrainingDocuments,
    part: Sequence[int],
    feature_size: int,
    read_in_step: bool,
) -> dict[str, int]:
    """Return the bytes of a training by part, in one process without a strategy.

    width: bytes of a weight of the target. part: lengths of the samples of the largest micro-batch. feature_size:
    elements of a token's features. read_in_step: by the target.
    """
    on_gpu = device_kind(config) == "gpu"
    weights, checkpoint, _ = saved_bytes(config, head)

    # The head learns span by span, and makes and frees logits in chunks; an lm_head of its own counts as chunks.
    head_width, part_tokens, most = (2 if config.precision == "bf16" else FLOAT32), sum(part), config.most_at_once
    vocab, whole_gradient = shape.vocab_size, False
    for module in head.modules():
        if isinstance(module, nn.Linear) and module.out_features > 8 * module.in_features:
            vocab, whole_gradient = module.out_features, module.weight.requires_grad
    share, device = documents.loss_share, torch.device("cuda" if on_gpu else "cpu")
    spans = [parts_in(part, span) for span in (cut_spans(part, most) if most else [(0, part_tokens)])]
    (learned, count), kept = max((head.loss_memory(config, own, share, head_width), own) for own in spans)
    chunk = max(own.stop - own.start for own in row_chunks(round(count), vocab, device, fewest=whole_gradient))
    tensors = CHUNK_TENSORS + (2 if getattr(head, "markov_head", None) is not None else 0)
    learned += tensors * FLOAT32 * chunk * vocab
    # Features as they came, and in the head's type.
    features = part_tokens * feature_size * (width if read_in_step else 2 * on_gpu)
    rows = sum(stop - start for start, stop, _ in kept)
    learned += rows * feature_size * (0 if head_width == width else FLOAT32 + head_width)
    # The target reads few samples at once, and holds the widest states of few tokens.
    read = max(*part, min(part_tokens, TOKENS_READ_ON_GPU if on_gpu else TOKENS_READ))
    mlp = 3 * shape.intermediate_size * min(read, MLP_ROWS)
    reading = read * feature_size + max(FROZEN_WIDTHS * shape.hidden_size * read, mlp)
    buffers = sum(buffer.nbytes for model in (target, head) for buffer in model.buffers())
    return {
        # Interpreter and libraries, which on a CPU are most of a small training.
        "libraries": 0 if on_gpu else process_memory(),
        "frozen": width * sum(p.numel() for p in target.parameters())
        + sum(p.nbytes for p in head.parameters() if not p.requires_grad)
        + buffers,
        "weights": weights,
        "gradients": weights,
        "optimizer": checkpoint - weights,
        # All parts of a step are in memory together, and the samples that the next one is made of.
        "batch": (config.accumulate + 1) * part_tokens * (BATCH_BYTES + (0 if read_in_step else 2 * feature_size)),
        # Activations are gone before the optimizer steps. On a GPU it steps all tensors at once, with temporaries.
        "activations": round(max(weights if on_gpu else 0, features + max(learned, width * reading * read_in_step))),
    }


def parts_in(part: Sequence[int], span: tuple[int, int]) -> DocumentParts:
    """Return the parts of packed documents of these lengths that lie in a span."""
    found, begin = list[tuple[int, int, int]](), 0
    for length in part:
        start, stop = max(span[0] - begin, 0), min(span[1] - begin, length)
        found += [(start, stop, length)] if start < stop else []
        begin += length
    return found


def rank_memory(process: dict[str, int], strategy: str, world: int) -> dict[str, int]:
    """Return the bytes of one rank under a strategy, by part, their peak and the host's, from those of one process.

    DDP reduces gradients in buckets as large as themselves. Stages 1 and 2 keep every weight, and a rank's part of a
    second copy that the optimizer steps; stage 2 keeps a rank's part of the gradients; stage 3 of the weights too,
    which it gathers for forward and backward. All of them reduce gradients a bucket at a time, 1 and 2 once all are
    computed.
    """
    memory, host, whole = dict(process), 0, process["weights"]
    if strategy == "ddp":
        memory["gradients"] += whole
    elif strategy.startswith("deepspeed"):
        from draftsmith.train.deepspeed import BUCKET

        stage, part = int(strategy.removeprefix("deepspeed_stage_")[0]), FLOAT32 * -(-whole // FLOAT32 // world)
        memory["optimizer"] = part + -(-process["optimizer"] // world)
        memory["gradients"] = (whole if stage == 1 else part) + min(whole, FLOAT32 * BUCKET) + (stage < 3) * whole
        # Its part, and what it gathers.
        memory["weights"] = part + whole if stage == 3 else whole
        if strategy.endswith("offload"):
            host, memory["optimizer"] = part + memory["optimizer"], 0
    return {**memory, "peak": sum(memory.values()), "host memory": host}


def show(config: TrainDrafterConfig, target: Checkpoint) -> None:
    """Print the plan."""
    plan = plan_of(config, target)
    documents, tokens, flops = plan.documents, sum(plan.documents.lengths), plan.step_flops
    per_step = tokens / plan.steps_per_epoch
    compute = "FLOPs that cannot be counted beforehand"
    if flops is not None:
        compute = f"{short(flops)}FLOPs a step, {short(flops * plan.steps)}FLOPs in all"
    parts = [f"{name} {short(size)}B" for name, size in plan.memory.items() if size and name != "peak"]
    facts = {
        "parameters": f"{short(plan.trained).strip()} trained, {short(plan.frozen).strip()} frozen",
        "data": f"{documents.source}: {len(documents.lengths):,} training samples, {tokens:,} tokens",
        "steps": f"{plan.steps:,} steps of {per_step:,.0f} tokens, {plan.steps / plan.steps_per_epoch:.3g} epochs",
        "compute": compute,
        "largest part": f"{plan.part_tokens:,} tokens at once, on {plan.world} ranks in {config.accumulate} parts",
        "memory of a rank": f"{short(plan.peak)}B with {plan.strategy}: {', '.join(parts)}",
        "checkpoints": f"{short(plan.checkpoint_bytes)}B each; at most {short(plan.disk_bytes)}B with best/ and last/",
        "features": ", ".join(f"{short(size)}B in {dtype}" for dtype, size in plan.feature_bytes.items()) or None,
    }
    print_facts(facts, f"{config.kind} head for {config.target}, planned from its config.json")
    for reason in () if config.drafter.own_layer else target.shape.reasons:
        print_text(f"The head has {reason}.")
    print_text(verdict(plan, config))
    hours, sentence = training_hours(plan, config)
    print_text(sentence)
    values = dataclasses.asdict(plan) | {"documents": {"source": documents.source, "tokens": tokens}}
    add_result(**values, memory=plan.memory, hours=hours)


def verdict(plan: TrainingPlan, config: TrainDrafterConfig) -> str:
    """Say whether a rank fits into its device's memory, and if not, what would."""
    on_gpu, budget = device_kind(config) == "gpu", 0.0
    if config.plan_gb is not None:
        budget = config.plan_gb * 1e9
    elif on_gpu and torch.cuda.device_count():
        budget = torch.cuda.get_device_properties(0).total_memory
    elif not on_gpu and plan.world == 1:
        budget = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not budget:
        return "Pass --plan-gb to see whether a rank fits into its device."
    if plan.peak <= budget:
        return f"Fits: a rank needs {short(plan.peak)}B of {short(budget)}B."
    others = (key for key in get_args(Strategy) if key != "auto")
    fitting = next((key for key in others if rank_memory(plan.process, key, plan.world)["peak"] <= budget), None)
    remedies, activations = [f"--strategy {fitting}"] if fitting else [], plan.process["activations"]
    left = budget - (plan.peak - activations)
    if left > 0:
        remedies.append(f"--accumulate {config.accumulate * math.ceil(activations / left)}")
    remedy = f"What would: {', '.join(remedies)}." if remedies else "Its weights alone are too large."
    return f"Does not fit: a rank needs {short(plan.peak)}B of {short(budget)}B. {remedy}"


def training_hours(plan: TrainingPlan, config: TrainDrafterConfig) -> tuple[float | None, str]:
    """Return the hours of the steps, validation not counted, and a sentence about them; None if no speed is known."""
    if config.minutes:
        return config.minutes / 60, f"Takes {config.minutes:g} minutes, as --minutes says."
    if config.plan_tflops is None:
        return None, "Pass --plan-tflops, a device's speed in training, to see how long it takes."
    if plan.step_flops is None:
        return None, "Its FLOPs cannot be counted beforehand: train some steps to see how long it takes."
    speed = config.plan_tflops * 1e12
    hours = plan.step_flops * plan.steps / plan.world / speed / 3600
    span = f"{max(1, 60 * hours):.0f} min"
    if hours >= 1.5:
        span = f"{hours:,.0f} h" if hours >= 100 else f"{hours:.3g} h"
    return hours, f"Takes about {span} without validation, at {short(speed)}FLOP/s a rank."


def short(number: float) -> str:
    """Return 1234567 as `1.23 M`, to be followed by a unit or a noun."""
    power = 0
    while number >= 1000 and power < 6:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {'kMGTPE'[power - 1] if power else ''}"

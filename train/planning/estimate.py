"""What a training will take, from its configuration alone; no weights are read.

A plan is made in three steps: the models' sizes (config.json, modules on the meta device), the documents (an artefact's
index, or an assumption), and what follows from both by memory.py, footprint.py and modules/flops.py.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from draftsmith.data.features import INDEX_BYTES_PER_TOKEN, check_disk
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.loading import DTYPES, read_config
from draftsmith.data.ranks import place
from draftsmith.data.store import feature_codec
from draftsmith.data.store.feature_codec import FeatureDtype
from draftsmith.modules import flops
from draftsmith.modules.drafters.eagle.head import LOOKAHEAD, EagleHead
from draftsmith.modules.layers import LlamaConfig, LlamaModel
from draftsmith.modules.targets.llama import SUPPORTED, llama_config
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.drafter import head_shape, target_shape
from draftsmith.train.planning import footprint
from draftsmith.train.planning.documents import Documents
from draftsmith.train.planning.footprint import PartShape
from draftsmith.train.planning.memory import (
    FLOAT32,
    LAYOUTS,
    HeadSizes,
    Memory,
    Sizes,
    Strategy,
    memory,
    moments,
    with_strategy,
)

# Of parts, only so many steps of an epoch are looked at for the largest.
STEPS_LOOKED_AT = 2000


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model by its config.json.

    llama: None for a family that only transformers runs. context: most positions. params: tied weights once. stored,
    width: bytes of an element in the checkpoint and in memory.
    """

    path: str
    llama: LlamaConfig | None
    hidden_size: int
    context: int
    params: int
    stored: int
    width: int


@dataclass(frozen=True)
class Plan:
    """What a training takes. Bytes, elements, tokens and model FLOPs.

    memories: (strategy, offload) -> of one rank. checkpoint_bytes: of one; disk_bytes: most on the disk at a time.
    feature_bytes: dtype -> on disk; None where there are none. part: the largest that a rank computes at once.
    """

    job: str
    model: str
    trained: int
    frozen: int
    documents: Documents
    world: int
    steps_per_epoch: int
    steps: int
    step_flops: float
    part: PartShape
    strategy: tuple[str, bool]
    memories: dict[tuple[str, bool], Memory]
    checkpoint_bytes: int
    disk_bytes: int
    feature_bytes: dict[str, int] | None

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch

    @property
    def own(self) -> Memory:
        """Of the configured strategy."""
        return self.memories[self.strategy]


def frozen_model(path: str, dtype: str) -> FrozenModel:
    """Sizes from config.json.

    dtype: float32, bfloat16, or auto for the checkpoint's own.

    Raises:
        InputError: no such model, or a config that neither we nor transformers can make a model of.
    """
    raw = read_config(path)
    stored = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    stored_bytes = DTYPES.get(stored, torch.float32).itemsize
    width = stored_bytes if dtype == "auto" else DTYPES[dtype].itemsize
    if raw.get("model_type") in SUPPORTED:
        config = llama_config(raw)
        with torch.device("meta"):
            params = sum(p.numel() for p in LlamaModel(config).parameters())
        return FrozenModel(path, config, config.hidden_size, config.max_position, params, stored_bytes, width)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        auto = AutoConfig.from_pretrained(str(model_directory(path)))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(auto)
    except (ValueError, KeyError, OSError) as error:
        found = f"{path} ({raw.get('model_type')}: {str(error).splitlines()[0]})"
        remedy = "Only models that transformers knows by their config.json can be planned."
        raise InputError("model", found, "a causal language model", remedy) from error
    text = auto.get_text_config()
    params = sum(p.numel() for p in model.parameters())
    context = getattr(text, "max_position_embeddings", None) or 2048
    return FrozenModel(path, None, text.hidden_size, context, params, stored_bytes, width)


def largest_part(order: Any, documents: Documents, shares: int, packed: bool) -> PartShape:
    """The largest of what a rank computes at once, over the steps of the first epoch.

    shares: ranks times accumulated parts, over which a step's samples are dealt out in turn.
    """
    best: list[int] = []
    for step in range(min(order.steps_per_epoch, STEPS_LOOKED_AT)):
        _, batch = order.step(step)
        for slot in range(min(shares, len(batch))):
            lengths = [documents.lengths[i] for i in batch[slot::shares]]
            if (sum if packed else padded)(lengths) > (sum if packed else padded)(best):
                best = lengths
    slots, real = padded(best), sum(best)
    tokens = real if packed else slots
    return PartShape(tokens, slots, max(best), round(real * documents.loss_share), packed)


def padded(lengths: Sequence[int]) -> int:
    """Tokens of a batch of these, padding included."""
    return max(lengths, default=0) * len(lengths)


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
    from draftsmith.train.data_module import Order

    return Order(lengths, config.seed, config.batch_size, config.tokens_per_batch, config.group_by_length)


def eagle_context(config: Any, target: FrozenModel) -> int:
    """Most tokens of a document: a head to fine-tune may reach less far than the target."""
    return min(target.context, head_shape(config, target.llama or target_shape(config.target)).llama.max_position)


def plan_eagle(config: Any, target: FrozenModel, documents: Documents, world: int = 0, base: int | None = None) -> Plan:
    """world: ranks; 0 takes what a launcher has set, or the config's. base: bytes of interpreter and libraries; None
    takes what this process has now, which has imported them and read no weights.

    Raises:
        InputError: a target of a family that the head can not take its layer from.
    """
    llama = target.llama or target_shape(config.target)
    settings = head_shape(config, llama)
    with torch.device("meta"):
        head = HeadSizes.of(EagleHead(settings))
    shape = settings.llama
    world = planned_world(config, world)
    order = order_of(config, documents.lengths)
    part = largest_part(order, documents, world * config.accumulate, packed=bool(config.tokens_per_batch))
    autocast, online = config.precision == "bf16", documents.kind != "features"
    frozen, loading = resident(target, config)
    if config.target_parallel == "tensor":
        frozen, loading = frozen // world, loading // world
    read = dataclasses.replace(part, tokens=part.slots)  # by the target: documents side by side
    sizes = Sizes(
        head=head,
        base=libraries(config) if base is None else base,
        frozen=frozen,
        loading=loading,
        batch=footprint.batch_bytes(0 if online else llama.hidden_size, part, config.accumulate),
        inputs=footprint.eagle_inputs(shape, part, target.width if online else 0),
        activations=footprint.eagle_saved(shape, part, config.unroll, autocast),
        widest=footprint.widest_backward(shape, part, autocast),
        loss=footprint.eagle_loss_bytes(shape, part, config.unroll, target.width),
        frozen_forward=footprint.frozen_forward(llama, read, target.width) if online else 0,
        optimizer=config.optimizer,
        accumulates=config.accumulate > 1,
        on_cpu=planned_device(config) == "cpu",
    )
    rows = [max(length - LOOKAHEAD, 0) for length in documents.lengths]
    counted = round(documents.tokens * documents.loss_share)
    epoch_flops = flops.eagle_training(shape, rows, counted, config.unroll)
    if online:
        # A cache is filled in the first epoch and read in the others.
        again = min(1.0, order.steps_per_epoch / total_steps(config, order)) if config.features == "cache" else 1.0
        epoch_flops += again * flops.layers_forward(llama, documents.lengths)
    dtypes: tuple[FeatureDtype, ...] = ("bf16", "fp8")
    features: dict[str, int] = {d: feature_bytes(llama.hidden_size, documents.tokens, d) for d in dtypes}
    return finish("eagle", config, target, documents, order, part, sizes, world, epoch_flops, features)


def finish(
    job: str,
    config: TrainConfig,
    model: FrozenModel,
    documents: Documents,
    order: Any,
    part: PartShape,
    sizes: Sizes,
    world: int,
    epoch_flops: float,
    features: dict[str, int] | None,
) -> Plan:
    """What both heads have in common."""
    strategy = planned_strategy(config, world)
    shown = [(name, offload) for name, offload in LAYOUTS if name != "one process" or world == 1]
    weights = FLOAT32 * sizes.head.params
    checkpoint = weights + moments(sizes.head, config.optimizer)
    return Plan(
        job=job,
        model=model.path,
        trained=sizes.head.params,
        frozen=model.params,
        documents=documents,
        world=world,
        steps_per_epoch=order.steps_per_epoch,
        steps=total_steps(config, order),
        step_flops=epoch_flops / order.steps_per_epoch,
        part=part,
        strategy=strategy,
        memories={key: memory(with_strategy(sizes, key[0], world, key[1])) for key in {*shown, strategy}},
        checkpoint_bytes=checkpoint,
        # One more than are kept while the newest is written; best/, last/ and the one that replaces either.
        disk_bytes=(config.keep + 1) * checkpoint + 3 * weights,
        feature_bytes=features,
    )


def total_steps(config: TrainConfig, order: Any) -> int:
    return config.max_steps or config.epochs * order.steps_per_epoch


def feature_bytes(hidden_size: int, tokens: int, dtype: FeatureDtype) -> int:
    """On disk, with their index."""
    return tokens * (feature_codec.token_bytes(hidden_size, dtype) + INDEX_BYTES_PER_TOKEN)


def planned_dtype(config: TrainConfig) -> str:
    """Type of the frozen model's weights, as `strategies.model_dtype` has it."""
    return "float32" if config.model_dtype == "auto" and planned_device(config) == "cpu" else config.model_dtype


def resident(model: FrozenModel, config: TrainConfig) -> tuple[int, int]:
    """Bytes of a frozen model as it stays on its device, and most while it is read."""
    on_cpu = planned_device(config) == "cpu"
    if on_cpu and model.llama is not None and config.engine != "hf":
        return footprint.lean_frozen(model.llama, model.params, model.stored, model.width)
    size = model.params * model.width
    return size, size + (model.params * model.stored if on_cpu else 0)


def libraries(config: TrainConfig) -> int:
    """Bytes of a rank's device that no tensor takes; of a GPU they are not known, nor counted by torch."""
    return own_memory() if planned_device(config) == "cpu" else 0


def own_memory() -> int:
    """Bytes of this process that are in memory now. Called once everything is imported, before any weights are there,
    it is what interpreter and libraries take."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def check_room(plan: Plan, output: Path) -> None:
    """Raises:
    InputError: the disk can not hold the run's checkpoints."""
    remedy = f"Free some space, pass a smaller --keep ({plan.checkpoint_bytes:,} bytes each), or use another disk."
    check_disk(output, plan.disk_bytes, "output", remedy)

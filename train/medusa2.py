"""`draftsmith train medusa2`: Medusa heads and their target together (Medusa-2, Cai et al. 2024, section 2.2.2).

The target learns by LoRA, with its original self as the teacher: the same weights without the adapters (section 2.3.2).
What comes out is ANOTHER model, saved as one beside its heads, with how far it is from the original. It is trained in
one process, and begun anew when it is stopped.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.data.console import note, say
from draftsmith.data.heads.card import model_card
from draftsmith.data.heads.directory import head_fields, save_head, starting_head, starting_settings
from draftsmith.data.models.device import check_device
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.loading import llama_shape, load_lm, tokenizer_identity
from draftsmith.data.settings import RemoteCode, check_not_negative, check_positive
from draftsmith.data.store.datasets import ResponsesDataset, collate_features, in_pieces
from draftsmith.data.store.files import copy_file, make_directory, whole_directory, write_text
from draftsmith.data.store.manifest import file_sha256, git_commit, package_versions, resolved
from draftsmith.data.store.writer import occupied, sole_writer
from draftsmith.modules.drafters.medusa import MedusaHead, MedusaSettings
from draftsmith.modules.losses import CHUNK_ELEMENTS, LmHead
from draftsmith.modules.types import FeatureBatch, InputError, at_most, between
from draftsmith.train.schedules import lr_schedule

if TYPE_CHECKING:
    from draftsmith.modules.targets.hf import HFLM

TARGET, HEADS = "medusa2-target", "medusa2-heads"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


@dataclass(frozen=True, kw_only=True)
class Medusa2Config(MedusaSettings, RemoteCode):
    """Train Medusa heads together with their target (Medusa-2), by LoRA and self-distillation. The result is another
    target with heads for it.

    Attributes:
        data: Responses of the target, or supervised prompts.
        target: Directory or hub id of the target model, or embedded:target.
        output: New directory that receives medusa2-target and medusa2-heads.
        head_weight: Weight of the heads' loss beside the divergence from the original target.
        heads_first: Share of all steps in which the heads are trained alone, so that new ones do not spoil the target.
        epochs: Passes over the data; not used when max_steps is given.
        max_steps: Optimiser steps in all; 0 leaves it to epochs.
        batch_size: Sequences in an optimiser step.
        lr: Peak learning rate of the heads.
        lora_lr: That of the target's adapters.
        lora_rank: Rank of the adapters, which all linear layers but the lm_head get.
        lora_alpha: Their scale, times the rank.
        warmup_share: Share of all steps in which the learning rates rise linearly from 0.
        clip: Largest gradient norm; 0 switches clipping off.
        val_share: Share of the conversations that is held out, for the numbers that are told.
        seed: Of new heads, adapters and the order of the data.
        log_every: Steps between two lines.
        device: cpu, cuda:0, ...
        num_threads: CPU threads; 0 is torch's own choice.
    """

    data: Path
    target: str
    output: Path
    head_weight: float = 0.2
    heads_first: float = 0.2
    epochs: int = 2
    max_steps: int = 0
    batch_size: int = 8
    lr: float = 1e-3
    lora_lr: float = 2.5e-4
    lora_rank: int = 32
    lora_alpha: int = 16
    warmup_share: float = 0.05
    clip: float = 1.0
    val_share: float = 0.05
    seed: int = 0
    log_every: int = 20
    device: str = "cpu"
    num_threads: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "epochs", "batch_size", "lora_rank", "log_every")
        check_not_negative(self, "max_steps", "num_threads", "clip", "head_weight", "lr", "lora_lr", "lora_alpha")
        between("val_share", self.val_share, 0, 1)
        for name in ("heads_first", "warmup_share"):
            check_not_negative(self, name)
            at_most(name, getattr(self, name), 1)


@dataclass(frozen=True)
class Distance:
    """How far a model is from another on a text, as means over its tokens' distributions at temperature 1.

    kl: KL(other || model) in nats. tv: total variation. top1: share of places where both choose the same token.
    """

    kl: float
    tv: float
    top1: float
    tokens: int

    def text(self) -> str:
        return f"KL {self.kl:.3g}, TV {self.tv:.3g}, same first choice {self.top1:.2%} of {self.tokens:,} tokens"


@sole_writer()
def run(config: Medusa2Config) -> Path:
    """Train, and write the new target and its heads.

    Raises:
        InputError: peft is not there, the output is, or target, data and heads do not fit.
    """
    if occupied(config.output):
        raise InputError("output", f"{config.output}, which exists", "a new directory", "Choose another, or remove it.")
    check_device(config.device)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    joint = Joint(config)
    train, val = samples_of(config, joint.target)
    trained(config, joint, train)
    distance, metrics = joint.measure(config, batches(val, range(len(val)), config.batch_size))
    say(f"from the original target, on {len(val)} held-out samples: {distance.text()}")
    make_directory(config.output)
    path = save(config, joint, distance, metrics)
    say(f"Another target: {config.output / TARGET}; its heads: {path}. Speed-ups are over its own ar:")
    say(f"  draftsmith eval bench --target {config.output / TARGET} --draft {path} --methods medusa --prompts FILE")
    return path


class Joint:
    """A target with adapters, and heads that read it."""

    def __init__(self, config: Medusa2Config):
        self.target = load_hf(config.target, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.head = new_heads(config, self.target)
            self.adapted = with_adapters(self.target.model, config)
        self.head.to(config.device)

    def states(self, batch: FeatureBatch, original: bool = False) -> Tensor:
        """[B, T, H] after the final norm; of the original target without a gradient."""
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        mask = None if batch.attention_mask is None else batch.attention_mask.long()
        if original:
            with self.adapted.disable_adapter(), torch.no_grad():
                return self._read(inputs, mask)
        return self._read(inputs, mask)

    def _read(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Tensor:
        return self.target.model.base_model(**inputs, attention_mask=mask).last_hidden_state

    def loss(self, batch: FeatureBatch, config: Medusa2Config, alone: bool) -> tuple[Tensor, Tensor]:
        """The divergence from the original and the heads' loss, means over tokens. alone: the heads learn, and the
        target's states have no gradient."""
        if alone:
            with torch.no_grad():
                states = self.states(batch)
            divergence = states.new_zeros(())
        else:
            original, states, places = self.states(batch, original=True), self.states(batch), counted(batch)
            divergence = compared(original[places], states[places], self.target.lm_head)[0] / places.sum().clamp_min(1)
        heads = self.head.loss(dataclasses.replace(batch, features=states), self.target, config, None).loss
        return divergence, heads

    @torch.no_grad()
    def measure(self, config: Medusa2Config, val: Iterator[FeatureBatch]) -> tuple[Distance, dict[str, float]]:
        """Over held-out samples: the distance from the original, and the heads' own numbers."""
        found, sums, counts = torch.zeros(4, dtype=torch.float64), dict[str, float](), dict[str, float]()
        for batch in val:
            batch = moved(batch, config.device)
            states, places = self.states(batch), counted(batch)
            own = compared(self.states(batch, original=True)[places], states[places], self.target.lm_head)
            found += torch.stack([*own, places.sum()]).double().cpu()
            output = self.head.loss(dataclasses.replace(batch, features=states), self.target, config, None)
            for name, value in output.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
                counts[name] = counts.get(name, 0.0) + float(output.counts[name])
        kl, tv, same, tokens = found.tolist()
        many = max(tokens, 1.0)
        metrics = {name: value / max(counts[name], 1.0) for name, value in sums.items()}
        return Distance(kl / many, tv / many, same / many, int(tokens)), metrics


def load_hf(path: str, config: Medusa2Config) -> HFLM:
    """A model as transformers has it, whose layers peft finds by their names."""
    loaded: Any = load_lm(path, "float32", config.device, "hf", config.trust_remote_code)
    return loaded


def compared(original: Tensor, states: Tensor, lm_head: LmHead) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over states [N, H] of KL(p || q), of TV(p, q) and of equal first choices, p of the original's states and q
    of the others'; logits are made CHUNK_ELEMENTS at a time, and again for the gradient of the first."""

    def chunk(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_p, log_q = (lm_head(part).float().log_softmax(-1) for part in (one, two))
        kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
        same = log_p.argmax(-1) == log_q.argmax(-1)
        return kl, (log_p.exp() - log_q.exp()).abs().sum().detach() / 2, same.sum()

    vocab = lm_head(states[:1]).shape[-1]
    parts = zip(original.split(rows := max(1, CHUNK_ELEMENTS // vocab)), states.split(rows), strict=True)
    found = [checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    kl, tv, same = (torch.stack([own[i] for own in found]).sum() for i in range(3))
    return kl, tv, same


def counted(batch: FeatureBatch) -> Tensor:
    """[B, T] bool: places whose next token is an answer's."""
    return F.pad(batch.loss_mask[:, 1:], (0, 1))


def new_heads(config: Medusa2Config, target: HFLM) -> MedusaHead:
    """As `train medusa` begins them, or those of `init`."""
    if config.init != "random":
        info = target.info
        shape = starting_settings(config.init, "medusa", info.hidden_size, info.vocab_size)
        MedusaHead.check_start(config, shape)
        head: Any = starting_head(config.init, "medusa", info.hidden_size, info.vocab_size)
        return head.float()
    made = MedusaHead(MedusaHead.shape(config, llama_shape(target, config.target)))
    if made.config.own_lm_head:
        made.copy_lm_head(target.model.get_output_embeddings().weight.detach())
    return made


def with_adapters(model: Any, config: Medusa2Config) -> Any:
    """The model with trainable LoRA in all linear layers but its output, which are where they were.

    Raises:
        InputError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        found, remedy = "no peft, which trains the target", "Run: pip install 'draftsmith[lora]'"
        raise InputError("train medusa2", found, "an installed package", remedy) from error
    layers = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear")
    return get_peft_model(model, dataclasses.replace(layers, task_type="CAUSAL_LM"))


def samples_of(config: Medusa2Config, target: HFLM) -> tuple[Sequence[Any], Sequence[Any]]:
    """Training and validation items; conversations stay on one side."""
    from draftsmith.train.data_module import held_out  # loads Lightning

    dataset = in_pieces(
        ResponsesDataset(config.data, config.target, target.info.identity),
        target.info.max_position,
        MedusaHead.lookahead,
    )
    rows = dataset.conversations
    kept = set(held_out(int(rows[-1]) + 1, config.val_share)[0].tolist())
    items = [dataset.item(number, 0) for number in range(len(dataset))]
    sides = [
        [item for item, row in zip(items, rows, strict=True) if (int(row) in kept) == side] for side in (True, False)
    ]
    return sides[0], sides[1]


def batches(items: Sequence[Any], order: Sequence[int], size: int) -> Iterator[FeatureBatch]:
    for start in range(0, len(order), size):
        yield collate_features([items[number] for number in order[start : start + size]])


def moved(batch: FeatureBatch, device: str) -> FeatureBatch:
    """The batch on the device."""
    tensors: dict[str, Any] = {
        name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return dataclasses.replace(batch, **tensors)


def trained(config: Medusa2Config, joint: Joint, train: Sequence[Any]) -> None:
    """Take all steps: those of the heads alone, then both."""
    an_epoch = -(-len(train) // config.batch_size)
    total = config.max_steps or config.epochs * an_epoch
    first = round(config.heads_first * total)
    adapters = [weight for weight in joint.adapted.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": list(joint.head.parameters())},
        {"params": adapters, "lr": config.lora_lr},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=0.0)
    share = lr_schedule("cosine", total, config.warmup_share, 0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    steps = shuffled(train, config)
    note(f"{total} steps on {len(train)} samples, the first {first} of the heads alone")
    for step in range(total):
        divergence, heads = joint.loss(moved(next(steps), config.device), config, alone=step < first)
        loss = heads if step < first else divergence + config.head_weight * heads
        if not bool(loss.isfinite()):
            raise InputError("loss", f"{float(loss)} in step {step + 1}", "a number", "Lower --lr and --lora-lr.")
        optimizer.zero_grad()
        loss.backward()
        if config.clip:
            torch.nn.utils.clip_grad_norm_([w for group in groups for w in group["params"]], config.clip)
        optimizer.step()
        schedule.step()
        if (step + 1) % config.log_every == 0 or step + 1 == total:
            told = f"heads {heads.item():.4g}, KL from the original {divergence.item():.3g}"
            note(f"step {step + 1}/{total}: {told}")


def shuffled(train: Sequence[Any], config: Medusa2Config) -> Iterator[FeatureBatch]:
    """Epochs without end, each in an order of its own."""
    rng = random.Random(config.seed)
    while True:
        yield from batches(train, rng.sample(range(len(train)), len(train)), config.batch_size)


def save(config: Medusa2Config, joint: Joint, distance: Distance, metrics: Mapping[str, float]) -> Path:
    """The merged target under a name that says what it is, and its heads."""
    original, directory = joint.target.info.identity, config.output / TARGET
    merged = joint.adapted.merge_and_unload()
    with whole_directory(directory) as partial:
        merged.save_pretrained(partial)
        source = model_directory(config.target)
        for file in source.iterdir():  # tokenizer, template, ends of answers
            if file.is_file() and not file.name.endswith(WEIGHTS) and not (partial / file.name).exists():
                copy_file(file, partial / file.name)
        write_text(partial / "README.md", target_card(config, distance))
    about = {
        "original": {"path": config.target, "target": original},
        "distance": dataclasses.asdict(distance),
        **{name: getattr(config, name) for name in ("head_weight", "heads_first", "lora_rank", "lora_alpha")},
    }
    identity = load_hf(str(directory), config).info.identity
    manifest = {
        "target": identity,
        "models": {"target": identity, **tokenizer_identity(str(directory))},
        "sampling": None,
        "medusa2": about,
        "inputs": {"data": file_sha256(config.data / "manifest.json")},
        "config": {**resolved(config), "target": str(directory)},
        "seed": config.seed,
        "metrics": dict(metrics),
        "packages": package_versions(),
        "git_commit": git_commit(),
    }
    card = model_card("medusa", {"head": head_fields(joint.head), **manifest})
    return save_head(config.output / HEADS, joint.head, manifest, card)


def target_card(config: Medusa2Config, distance: Distance) -> str:
    """README.md of the new target."""
    return (
        f"# A Medusa-2 target, and not {config.target}\n\n"
        f"{config.target} was trained together with Medusa heads (LoRA of rank {config.lora_rank}, self-distillation; "
        f"Cai et al. 2024, section 2.2.2). It is another model: on held-out answers it is {distance.text()} from the "
        f"original. A speed-up of its heads is over its own autoregressive decoding.\n"
    )

"""Measure a training step beside a bare PyTorch loop: `python benchmarks/throughput.py --output DIR`.

Our step is the real path: `fit` with its data module, callbacks and loggers. The bare loop takes the same batches, head
and loss. Both run on one thread and are timed by process CPU time; they take turns step by step, so that a machine
whose speed drifts favors neither.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from draftsmith.benchmarks.measured import Measured, describe_run, report
from draftsmith.benchmarks.synthetic import Weights, random_weights
from draftsmith.data.store.datasets import Item, pack_features
from draftsmith.data.store.writer import sole_writer
from draftsmith.launch.cli import main_of
from draftsmith.modules.drafters.base import TrainStep
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.types import LossOutput, check_range
from draftsmith.train.config import drafter_config
from draftsmith.train.data import HeadDataModule, MicroBatch, Order, Samples
from draftsmith.train.fit import fit
from draftsmith.train.module import LitDrafter
from draftsmith.train.optimizers import lr_share
from draftsmith.train.plan import measured_peak

WARM_UP = 2  # steps that are not counted
PEAK_FOR_S = 3.0
# Lengths of conversations in tokens: log-normal, with the median and spread of shared chats, cut at both ends.
DIALOGUE_MEDIAN, DIALOGUE_SIGMA = 400, 0.9
DIALOGUE_SHORTEST, DIALOGUE_LONGEST = 50, 1500
# Share of a document that the user wrote; the rest is the response, which the loss counts.
PROMPT_SHARE = 0.3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ThroughputConfig:
    """Measures a training step against a bare loop over the same head and loss, on one CPU thread.

    Attributes:
        output: Directory that receives throughput.json and throughput.md.
        hidden: Hidden size of target and head.
        vocab: Vocabulary size of the target.
        layers: Decoder layers of the head.
        tokens: Tokens per batch.
        documents: Random documents with the lengths of dialogues: log-normal, 50 to 1500 tokens.
        scale: Factor on all lengths.
        dtype: float32, or bfloat16 weights of the target with autocast around the head.
        steps: Steps to count; 0 takes as many as read every document once.
        compile_head: Also measure a bare loop with torch.compile around the head.
        seed: Seed of weights and documents.
    """

    output: Path = field(kw_only=True)
    hidden: int = 512
    vocab: int = 32_000
    layers: int = 1
    tokens: int = 2048
    documents: int = 48
    scale: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: int = 0
    compile_head: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        longest = math.ceil(DIALOGUE_LONGEST * self.scale)
        limits = {"hidden": 64, "vocab": 16, "layers": 1, "documents": 2, "steps": 0, "tokens": longest}
        for name, least in limits.items():
            check_range(name, getattr(self, name), least)


class RandomDocuments:
    """Dataset of documents with random tokens and features, held in memory."""

    def __init__(self, lengths: Sequence[int], hidden: int, vocab: int, seed: int = 0):
        self.lengths = list(lengths)
        generator = torch.Generator().manual_seed(seed)
        self._items: list[Item] = [
            {
                "input_ids": torch.randint(vocab, (length,), generator=generator),
                "features": torch.randn(length, hidden, generator=generator).to(torch.bfloat16),
                "loss_mask": torch.arange(length) >= int(length * PROMPT_SHARE),
            }
            for length in self.lengths
        ]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, row: int) -> Item:
        return self.item(row, 0)

    def item(self, row: int, epoch: int) -> Item:
        return dict(self._items[row])

    def answer_lengths(self, rows: Sequence[int]) -> np.ndarray:
        return np.array([int(self._items[row]["loss_mask"].sum()) for row in rows])


def dialogue_lengths(count: int, seed: int = 0, scale: float = 1.0) -> list[int]:
    """Draw the lengths of `count` conversations in tokens, all multiplied by `scale`."""
    rng = random.Random(f"dialogue/{seed}")
    drawn = (rng.lognormvariate(math.log(DIALOGUE_MEDIAN), DIALOGUE_SIGMA) for _ in range(count))
    return [max(4, round(min(max(length, DIALOGUE_SHORTEST), DIALOGUE_LONGEST) * scale)) for length in drawn]


class Workload:
    """Target, documents and the head's first weights, shared by both loops."""

    def __init__(self, config: ThroughputConfig):
        self.config = config
        heads = max(1, config.hidden // 64)
        raw = {
            "model_type": "llama", "vocab_size": config.vocab, "hidden_size": config.hidden,
            "intermediate_size": -(-config.hidden * 8 // 3 // 64) * 64, "num_hidden_layers": 1,
            "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        }  # fmt: skip
        weights: Weights = random_weights(raw, DTYPES[config.dtype], "cpu")
        self.target = weights.lean(packed=False)
        lengths = dialogue_lengths(config.documents, config.seed, config.scale)
        dataset: Any = RandomDocuments(lengths, config.hidden, config.vocab, config.seed)
        self.samples = Samples(dataset, range(len(dataset)))
        torch.manual_seed(config.seed)
        self.head = EagleHead(EagleConfig.for_target(self.target.config, config.layers))

    def training_config(self, output: Path, steps: int, noise: float = 0.1) -> Any:
        """Return the options of a training of so many steps."""
        options: Any = drafter_config("eagle")
        return options(
            target="synthetic", data=Path("synthetic"), output=output,
            tokens_per_batch=self.config.tokens, max_steps=steps,
            val_every=steps,  # at the end, off the clock
            precision="bf16" if self.config.dtype == "bfloat16" else "32",
            seed=self.config.seed, noise=noise, num_threads=1, accelerator="cpu", tau_prompts=0, loggers=("csv",),
        )  # fmt: skip


@dataclass(frozen=True)
class TimedStep:
    """A measured step: its tokens, its loss and its CPU seconds."""

    tokens: int
    loss: float
    seconds: float


class BareLoop:
    """Plain PyTorch loop over the batches, head and loss of a training, without Lightning."""

    def __init__(self, work: Workload, config: Any, compiled: bool = False):
        self.work, self.config = work, config
        self.head = copy.deepcopy(work.head)
        if compiled:
            # The compiled function takes the method's place on this head alone, which mypy allows of no method.
            self.head.unroll = torch.compile(self.head.unroll, dynamic=True)  # type: ignore[method-assign]
        groups = [
            {"params": [p for p in self.head.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.head.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
        plan = (config.max_steps, config.schedule, config.warmup_share, config.min_lr_share)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: lr_share(step, *plan))
        order = Order(work.samples.lengths, config.seed, 1, config.tokens_per_batch)
        rows = [order.step(step)[1] for step in range(config.max_steps)]
        dataset: Any = work.samples.dataset
        self.batches = iter(DataLoader(dataset, batch_sampler=rows, collate_fn=pack_features))

    def step(self) -> TimedStep:
        """Run forward, backward, clipping and update on the next batch."""
        config, started = self.config, time.process_time()
        batch = next(self.batches)
        # By its own draws of noise, whose cost is a step's too.
        step = TrainStep(0, config.max_steps, batch.lengths, range(len(batch.lengths)), logged=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
            loss = self.head.loss(batch, self.work.target, config, step).loss
        loss.backward()
        if config.clip:
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), config.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

        assert batch.attention_mask is not None
        return TimedStep(int(batch.attention_mask.sum()), float(loss.detach()), time.process_time() - started)


class InterleavedEagle(LitDrafter):
    """Our training step, which lets another loop take its step first, off the clock."""

    def __init__(self, *args: Any, between_steps: Callable[[], object], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.timed_steps: list[TimedStep] = []
        self._between_steps, self._started = between_steps, 0.0
        self._previous: tuple[int, Tensor] | None = None

    def loss(self, inputs: Any, step: Any) -> LossOutput:
        output = super().loss(inputs, step)
        self._loss = output.loss.detach()
        return output

    def training_step(self, parts: list[MicroBatch], batch_idx: int) -> None:
        # A step lasts until the next one begins: it ends with what Lightning does after it.
        arrived = time.process_time()
        if self._previous is not None:
            tokens, loss = self._previous
            self.timed_steps.append(TimedStep(tokens, float(loss), arrived - self._started))
        self._between_steps()
        self._started = time.process_time()
        super().training_step(parts, batch_idx)
        self._previous = sum(length for part in parts for length in part.real_lengths), self._loss


def train_ours(work: Workload, config: Any, between_steps: Callable[[], object] = lambda: None) -> list[TimedStep]:
    """Run a training with `fit` and return its steps but the last."""
    shortest = min(range(len(work.samples)), key=work.samples.lengths.__getitem__)
    val = Samples(work.samples.dataset, [shortest])
    data = HeadDataModule(work.samples, val, config)
    module = InterleavedEagle(copy.deepcopy(work.head), work.target, config, between_steps=between_steps)
    module.feature_std = 1.0
    fit(module, data)
    return module.timed_steps


def paired_steps(
    work: Workload, steps: int, compiled: bool = False, warm_up: int = WARM_UP
) -> tuple[list[TimedStep], list[TimedStep]]:
    """Return the counted steps of ours and of a bare loop that took turns with it."""
    total = warm_up + steps + 1
    with tempfile.TemporaryDirectory(prefix="draftsmith-throughput-") as folder:
        config = work.training_config(Path(folder) / "run", total)
        loop, theirs = BareLoop(work, config, compiled), list[TimedStep]()

        def step() -> None:
            if len(theirs) < total - 1:  # our last step is not timed to its end
                theirs.append(loop.step())

        ours = train_ours(work, config, step)
    return ours[warm_up:], theirs[warm_up:]


def tokens_per_s(steps: Sequence[TimedStep]) -> float:
    """Return tokens per second over all steps: a ratio of sums."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def slowdown(ours: Sequence[TimedStep], theirs: Sequence[TimedStep]) -> float:
    """Return by how many per cent our steps are slower on the same batches: the median over pairs."""
    return 100 * (statistics.median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True)) - 1)


def measure(config: ThroughputConfig) -> Iterator[Measured]:
    """Yield every number."""
    work = Workload(config)
    lengths = work.samples.lengths
    steps = config.steps or -(-int(sum(lengths)) // config.tokens)
    ours, bare = paired_steps(work, steps)
    yield Measured("bare: tokens per CPU second", tokens_per_s(bare), "tokens/s")
    yield Measured("ours: tokens per CPU second", tokens_per_s(ours), "tokens/s")
    yield Measured("ours is slower than the bare loop by", slowdown(ours, bare), "%", "<= 3")

    if config.compile_head:
        again, compiled = paired_steps(work, steps, compiled=True)
        # Each is compared to ours of its own run: the machine may have changed its speed between them.
        ratio = (1 + slowdown(again, compiled) / 100) / (1 + slowdown(ours, bare) / 100)
        yield Measured("bare with torch.compile for the head / without", ratio, "x")

    counted = sum(int(work.samples.dataset[i]["loss_mask"][2:].sum()) for i in range(len(lengths)))
    settings, step = work.training_config(Path("unused"), steps), TrainStep(0, 1, lengths.tolist(), ())
    flops = work.head.flops(settings, step, counted) / sum(lengths)  # per token
    peak = measured_peak(torch.device("cpu"), DTYPES[config.dtype], time.process_time, PEAK_FOR_S)
    yield Measured(
        "ours: model FLOPs / FLOPs of large matrix products here", 100 * flops * tokens_per_s(ours) / peak, "%"
    )


@sole_writer()
def run(config: ThroughputConfig) -> Path:
    """Measure, print every row as it comes, write throughput.json and throughput.md; return the directory."""
    torch.set_num_threads(1)
    return report(config, "throughput", measure(config), describe_run(config))


if __name__ == "__main__":
    sys.exit(main_of(ThroughputConfig, run))

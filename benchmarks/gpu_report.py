"""`python benchmarks/gpu_report.py --output DIR`: decoding and training of an 8B shape, against what a GPU allows.

Weights are random: what is decoded means nothing, and an untrained head's drafts are hardly ever accepted, so times are
taken by the round. Ideal is a round whose calls take no longer than reading their weights and caches at the speed of a
copy, or than their products at that of large ones, whichever is slower; nothing else is in it.
"""

from __future__ import annotations

import gc
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

from draftsmith.benchmarks.measured import Measured, report
from draftsmith.benchmarks.synthetic import SHAPES, random_head, random_pair
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.eval.clock import clock_of
from draftsmith.launch.cli import main_of
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.plain import PromptAnswer, RowPool
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.models import check_device
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams, check_range
from draftsmith.train.config import drafter_config
from draftsmith.train.data import HeadDataModule, Samples
from draftsmith.train.fit import fit
from draftsmith.train.module import LitDrafter
from draftsmith.train.plan import TrainingDocuments, plan_of
from draftsmith.train.strategies import resolve_precision
from draftsmith.train.tracking import Telemetry

PARTS = ("rows", "decoding", "training")
METHODS = ("ar", "spec:k=5", "eagle:k=5", "eagle3:k=5", "dspark:k=7")
HEADS = ("eagle", "eagle3", "dspark")
# Anchors of DSpark for each token of a training step: 512 of 8,192.
ANCHORS_SHARE = 1 / 16
WARM_UP, TIMED = 3, 5  # training steps
LOSS_FROM = 0.3  # of a made-up document: what follows is answer


@dataclass(frozen=True)
class GpuReportConfig:
    """Measures decoding and the training of a head of a target of random weights against what the device allows.

    Attributes:
        output: Directory that receives gpu.json and gpu.md.
        device: cuda, cuda:1, ... or cpu.
        parts: What is measured, separated by commas: rows, decoding, training.
        shape: Of the target: llama-3-8b (16 GB in bfloat16), 88m, or tiny.
        batches: Numbers of rows that are answered together without a draft, separated by commas.
        prompt: Tokens of each prompt.
        new_tokens: Length of answers.
        repeats: Runs of which the median counts.
        tokens: Of a training step, at most.
        document: Tokens of each training document.
        ttt_steps: Draft steps that the EAGLE-3 head is trained on.
        num_workers: Processes that read training data.
    """

    output: Path = field(kw_only=True)
    device: str = "cuda"
    parts: str = ",".join(PARTS)
    shape: Literal["llama-3-8b", "88m", "tiny"] = "llama-3-8b"
    batches: str = "1,8,32"
    prompt: int = 256
    new_tokens: int = 64
    repeats: int = 3
    tokens: int = 8192
    document: int = 2048
    ttt_steps: int = 7
    num_workers: int = 2

    def __post_init__(self) -> None:
        for name, least in {"new_tokens": 8, "repeats": 1, "ttt_steps": 1, "num_workers": 0}.items():
            check_range(name, getattr(self, name), least)
        check_range("document", self.document, 16, SHAPES[self.shape]["max_position_embeddings"])
        check_range("tokens", self.tokens, self.document)
        if not all(part.isdigit() and int(part) for part in self.batches.split(",")):
            raise InputError("batches", self.batches, "numbers above 0 with commas between them", "Correct it.")
        if unknown := set(self.parts.split(",")) - set(PARTS):
            raise InputError("parts", ", ".join(sorted(unknown)), f"some of {', '.join(PARTS)}", "Correct it.")
        check_range("prompt", self.prompt, 1, SHAPES[self.shape]["max_position_embeddings"] - self.new_tokens)
        check_device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if torch.device(self.device).type == "cpu" else torch.bfloat16


@dataclass(frozen=True)
class Machine:
    """Bytes per second of a copy, reads and writes counted; FLOP/s of large products."""

    bandwidth: float
    flops: float
    itemsize: int

    @classmethod
    def of(cls, config: GpuReportConfig) -> Machine:
        device, clock = torch.device(config.device), clock_of(config.device, 1)
        size = 2**30 if device.type == "cuda" else 2**26
        source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        best = 0.0
        for _ in range(10):
            started = clock()
            target.copy_(source)
            best = max(best, 2 * size / (clock() - started))
        return cls(best, measured_peak(device, config.dtype, clock), config.dtype.itemsize)

    def seconds(self, weight_bytes: float, inputs: int, cache_bytes: float = 0.0) -> float:
        """The least that a call takes: a product reads each of its weights once, and multiplies it with every input."""
        products = 2 * weight_bytes / self.itemsize * inputs
        return max((weight_bytes + cache_bytes) / self.bandwidth, products / self.flops)


@dataclass(frozen=True)
class Subjects:
    """A random target, its draft, and untrained heads.

    raw: the target's config.json. target_bytes, draft_bytes: what one call of it reads, or one step of a kind of
    drafter; token_bytes: of a token's keys and values in the target's cache.
    """

    raw: dict[str, Any]
    models: Models
    target_bytes: int
    draft_bytes: dict[str, int]
    token_bytes: int

    @classmethod
    def of(cls, config: GpuReportConfig) -> Subjects:
        weights, small = random_pair(config.shape, config.dtype, config.device)
        target = weights.lean(packed=False)
        heads = {kind: random_head(kind, target) for kind in HEADS}
        models = Models(target, small.lean(packed=False), heads=heads, capacity=config.prompt + config.new_tokens + 8)
        read = {kind: sum(weight.nbytes for weight in head.parameters()) for kind, head in heads.items()}
        for kind in ("eagle", "dspark"):
            read[kind] += weights.state["lm_head.weight"].nbytes  # its own is the target's
        llama = target.config
        cached = 2 * llama.num_layers * llama.num_kv_heads * llama.head_dim * config.dtype.itemsize
        drafts = {"draft": small.forward_bytes, **read}
        return cls(weights.raw, models, weights.forward_bytes, drafts, cached)


def rows_apart(config: GpuReportConfig, subjects: Subjects) -> Iterator[Measured]:
    """Measure a round of `ar` by the decoder of one row, and by that of several rows for one."""
    alone, pooled = (timed_rounds(config, subjects.models, "ar", 1, pooled) for pooled in (False, True))
    for where, (taken, made) in {"one row": alone, "a pool of one row": pooled}.items():
        yield Measured(f"ar, {where}: a round", 1e3 * taken / len(made[0].trace.steps), "ms")
    yield Measured("ar, a pool of one row / one row", pooled[0] / alone[0])


def decoding(config: GpuReportConfig, subjects: Subjects, machine: Machine) -> Iterator[Measured]:
    """Measure each method, and `ar` at each number of rows, by its rounds; prompts are read off the clock."""
    for rows in map(int, config.batches.split(",")):
        for name in METHODS if rows == 1 else ["ar"]:
            taken, made = timed_rounds(config, subjects.models, name, rows)
            ideal = ideal_s(config, subjects, machine, name, made)
            rounds = max(len(one.trace.steps) for one in made)
            where, aim = f"{name}, {rows} row{'s' * (rows > 1)}", ">= 0.9" if rows == 1 else ""
            yield Measured(f"{where}: a round", 1e3 * taken / rounds, "ms")
            yield Measured(f"{where}: achieved / ideal", ideal / taken, "", aim)
            tokens = sum(len(one.tokens) - 1 for one in made)
            yield Measured(f"{where}: tokens a second, of untrained drafts", tokens / taken, "tokens/s")


@torch.inference_mode()
def timed_rounds(
    config: GpuReportConfig, models: Models, name: str, rows: int, pooled: bool = False
) -> tuple[float, list[Generation]]:
    """Return the responses, and their seconds without those of the first tokens. pooled: also a single row is answered
    by the decoder of several."""
    clock, method = clock_of(config.device, 1), parse_method(name)
    drafter = method.build(models)
    aux_layers = () if drafter is None else drafter.aux_layers
    session = models.target.session(rows, models.capacity, aux_layers)
    params, longest = SamplingParams(), config.prompt + config.new_tokens
    runner = EngineRunner(models.target, drafter, params, (), session=session)
    pool = RowPool(models.target, params, rows, longest, session)
    vocab = models.target.info.vocab_size
    prompts = [[(31 * row + i) % vocab for i in range(config.prompt)] for row in range(rows)]

    def answer(count: int) -> list[Generation]:
        if rows == 1 and not pooled:
            return [runner(prompts[0], count, 0)]
        waiting = [PromptAnswer(models.target.info, prompt, count, TorchSource(0), ()) for prompt in prompts]
        return [Generation(row.tokens, row.trace, row.ended) for row in pool.run(waiting)]

    seconds: dict[int, list[float]] = {config.new_tokens: [], 1: []}
    for turn in range(config.repeats + 1):
        for count, taken in seconds.items():
            started = clock()
            found = answer(count)
            if turn:  # the first one warms up, and captures
                taken.append(clock() - started)
            if count > 1:
                made = found
    whole, first = (statistics.median(taken) for taken in seconds.values())
    return max(whole - first, 1e-9), made


def ideal_s(
    config: GpuReportConfig, subjects: Subjects, machine: Machine, name: str, made: Sequence[Generation]
) -> float:
    """Compute the seconds of the rounds from what their calls read and multiply. Rows run their rounds together."""
    longest = max(made, key=lambda one: len(one.trace.steps)).trace.steps
    kind, rows = {"spec": "draft"}.get(name.partition(":")[0], name.partition(":")[0]), len(made)
    cache = rows * (config.prompt + config.new_tokens / 2) * subjects.token_bytes
    total = 0.0
    for step in longest:
        total += machine.seconds(subjects.target_bytes, rows * (step.num_drafted + 1), cache)
        total += step.draft_calls * machine.seconds(subjects.draft_bytes.get(kind, 0), rows)
    return total


class Texts:
    """Dataset of random documents in memory; features are computed online."""

    def __init__(self, count: int, length: int, vocab: int):
        self.lengths, self._length, self._vocab = [length] * count, length, vocab

    def __len__(self) -> int:
        return len(self.lengths)

    def item(self, row: int, epoch: int) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(row)
        ids = torch.randint(self._vocab, (self._length,), generator=rng)
        return {"input_ids": ids, "loss_mask": torch.arange(self._length) >= LOSS_FROM * self._length}

    def answer_lengths(self, rows: Sequence[int]) -> np.ndarray:
        return np.full(len(rows), round((1 - LOSS_FROM) * self._length))


class TimedDrafter(LitDrafter):
    """Drafter in training whose costs are those of the steps after the warm-up."""

    def training_step(self, parts: Any, batch_idx: int) -> None:
        super().training_step(parts, batch_idx)
        if self.trainer.global_step == WARM_UP:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.telemetry.take(self.device)


def training(
    kind: str, config: GpuReportConfig, raw: dict[str, Any], target: LlamaLM, machine: Machine
) -> Iterator[Measured]:
    """Run some steps of `draftsmith train KIND` with online features."""
    steps, device, documents = WARM_UP + TIMED, torch.device(config.device), config.tokens // config.document
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory(prefix="draftsmith-gpu-") as folder:
        settings = training_settings(kind, config, Path(folder), raw)
        drafter: Any = settings.drafter
        torch.manual_seed(0)
        head = drafter(drafter.new_config(settings, target.config))
        head.freeze(settings)
        texts = Texts(steps * documents, config.document, target.info.vocab_size)
        samples = Samples(texts, range(len(texts)))
        module = TimedDrafter(head, target, settings)
        module.telemetry = Telemetry(count_flops=True)
        fit(module, HeadDataModule(samples, samples, settings), limit_val_batches=0)
        costs = {name.removeprefix("cost/"): value for name, value in module.logged.items() if name.startswith("cost/")}
        planned = TrainingDocuments(samples.lengths.tolist(), 1 - LOSS_FROM, "made up")
        peak = plan_of(settings, documents=planned).peak
    what = f"eagle3, {config.ttt_steps} ttt_steps" if kind == "eagle3" else kind
    yield Measured(f"{what}: a step", 1e3 / costs["steps_per_s"], "ms")
    yield Measured(f"{what}: tokens a second", costs["tokens_per_s"], "tokens/s")
    yield Measured(f"{what}: waiting for data", 100 * costs["data_wait"], "%", "< 2")
    yield Measured(f"{what}: peak memory", costs["memory_gb"], "GB")
    yield Measured(f"{what}: peak memory, planned / measured", peak / 1e9 / costs["memory_gb"], "", "0.9 to 1.1")
    share = 100e12 * costs["tflops"] / machine.flops
    yield Measured(f"{what}: model FLOPs of what the device could do", share, "%", ">= 50")


def measured_peak(
    device: torch.device,
    dtype: torch.dtype,
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = 0.2,
) -> float:
    """Return the FLOP/s of the fastest square product that fits the time budget."""
    begin, size, best = clock(), 128, 0.0
    while True:
        left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        for _ in range(3):
            start = clock()
            left @ right
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken = clock() - start
            best = max(best, 2 * size**3 / max(taken, 1e-9))
        # The next size takes eight times as long, three times over.
        if clock() - begin + 24 * taken > budget_s or size >= 8192:
            return best
        size *= 2


def training_settings(kind: str, config: GpuReportConfig, folder: Path, raw: dict[str, Any]) -> Any:
    """Return the training's options. The target's directory has only a config.json, for the plan."""
    steps = WARM_UP + TIMED
    make_directory(folder / "target")
    dtype = str(config.dtype).removeprefix("torch.")
    write_json(folder / "target" / "config.json", {**raw, "torch_dtype": dtype})
    made: Any = drafter_config(kind)
    own = {"ttt_steps": config.ttt_steps}
    if kind == "dspark":
        # `anchors` counts those of a text.
        own = {"num_layers": 5, "block": 8, "markov_rank": 256, "anchors": round(ANCHORS_SHARE * config.document)}
    return resolve_precision(
        made(
            target=str(folder / "target"),
            data=folder / "data",
            output=folder / "run",
            tokens_per_batch=config.tokens,
            max_steps=steps,
            num_workers=config.num_workers,
            device="cuda" if torch.device(config.device).type == "cuda" else "cpu",
            tau_prompts=0,
            log_every=steps,
            loggers=("csv",),
            **own,
        )
    )


def measure_all(config: GpuReportConfig) -> Iterator[Measured]:
    """Yield the rows of the device, of decoding and of training."""
    machine = Machine.of(config)
    yield Measured("a copy's bandwidth, read and written", machine.bandwidth / 1e9, "GB/s")
    yield Measured("large products", machine.flops / 1e12, "TFLOP/s")
    parts, subjects = config.parts.split(","), Subjects.of(config)
    raw, target = subjects.raw, subjects.models.target
    assert isinstance(target, LlamaLM)
    if "rows" in parts:
        yield from rows_apart(config, subjects)
    if "decoding" in parts:
        yield from decoding(config, subjects, machine)
    del subjects  # drafts and heads take no room in the training
    for kind in ("eagle3", "dspark") if "training" in parts else ():
        yield from training(kind, config, raw, target, machine)


@sole_writer()
def run(config: GpuReportConfig) -> Path:
    """Measure, print every row as it comes, write gpu.json and gpu.md; return the directory."""
    if torch.device(config.device).type == "cpu":
        torch.set_num_threads(1)
    return report(config, "gpu", measure_all(config))


if __name__ == "__main__":
    sys.exit(main_of(GpuReportConfig, run))

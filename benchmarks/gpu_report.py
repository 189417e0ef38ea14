"""`python benchmarks/gpu_report.py --output DIR`: decoding and training of an 8B shape, against what a GPU allows, and
with torch.compile, beside each other.

Weights are random: what is decoded means nothing, and an untrained head's drafts are hardly ever accepted, so times are
taken by the round. Ideal is a round whose calls take no longer than reading their weights and caches at the speed of a
copy, or than their products at that of large ones, whichever is slower; nothing else is in it.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from draftsmith.benchmarks.measured import Measured, describe_run, report
from draftsmith.benchmarks.synthetic import SHAPES, random_eagle_head, random_pair
from draftsmith.data.console import log_note
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.eval.clock import clock_of, interleaved
from draftsmith.launch.cli import main_of
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.plain import PromptAnswer, RowPool
from draftsmith.modules.drafters import head_class
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.engine.cache import CachedAttention
from draftsmith.modules.engine.graphs import Graphed
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.models import check_device
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams, check_range
from draftsmith.train import strategies
from draftsmith.train.config import drafter_config
from draftsmith.train.data import HeadDataModule, Samples
from draftsmith.train.fit import fit
from draftsmith.train.module import LitDrafter
from draftsmith.train.plan import measured_peak, plan_of
from draftsmith.train.strategies import resolve_precision
from draftsmith.train.tracking import Telemetry

METHODS = ("ar", "spec:k=5", "eagle:k=5", "eagle3:k=5")
WARM_UP, TIMED = 3, 5  # training steps
LOSS_FROM = 0.3  # of a made-up document: what follows is answer
LAYER_CALLS = 20  # of a layer, timed together
# Blocks that speculators' trainer takes of a pack of so many tokens; ours counts those of a text.
PACK, PACK_BLOCKS = 8192, 512
# A DSpark head as speculators' trainer makes it by default.
DSPARK: dict[str, Any] = {"block": 8, "num_layers": 5, "markov_rank": 256}
ZERO = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
RANKS_S = 100.0  # a launch of ranks that takes longer hangs
SECTIONS = ("decoding", "layer", "training", "dspark", "compiled", "ranks")


@dataclass(frozen=True)
class GpuReportConfig:
    """Measures decoding and the training of heads of a target of random weights against what the device allows: in
    sections, of which one that fails does not take the others with it.

    Attributes:
        output: Directory that receives gpu.json and gpu.md.
        device: cuda, cuda:1, ... or cpu.
        shape: Of the target: llama-3-8b (16 GB in bfloat16), 88m, or tiny.
        batches: Numbers of rows that are answered together without a draft, separated by commas.
        prompt: Tokens of each prompt.
        new_tokens: Length of answers.
        repeats: Runs of which the median counts.
        tokens: Of a training step, at most.
        document: Tokens of each training document.
        ttt_steps: Draft steps that the head is trained on.
        num_workers: Processes that read training data.
        sections: Parts of the report, separated by commas, in this order: decoding; layer, a decoder layer with
            torch.compile; training, EAGLE-3; dspark, its step beside EAGLE-3's with as many blocks as speculators
            takes; compiled, EAGLE-3's head with torch.compile; ranks, DDP and ZeRO on a small target, by one NCCL rank
            and by two over gloo that share the device.
        minutes: No section begins after so many.
        compiler: Backend of torch.compile; aot_eager needs no compiler.
    """

    output: Path = field(kw_only=True)
    device: str = "cuda"
    shape: Literal["llama-3-8b", "88m", "tiny"] = "llama-3-8b"
    batches: str = "1,8,32"
    prompt: int = 256
    new_tokens: int = 64
    repeats: int = 3
    tokens: int = 8192
    document: int = 2048
    ttt_steps: int = 7
    num_workers: int = 2
    sections: str = ",".join(SECTIONS)
    minutes: float = 6.0
    compiler: str = "inductor"

    def __post_init__(self) -> None:
        for name, least in {"prompt": 1, "new_tokens": 8, "repeats": 1, "ttt_steps": 1, "num_workers": 0}.items():
            check_range(name, getattr(self, name), least)
        check_range("document", self.document, 16)
        check_range("tokens", self.tokens, self.document)
        if not all(part.isdigit() and int(part) for part in self.batches.split(",")):
            raise InputError("batches", self.batches, "numbers above 0 with commas between them", "Correct it.")
        if not set(self.sections.split(",")) <= set(SECTIONS):
            raise InputError("sections", self.sections, f"some of {','.join(SECTIONS)}", "Correct it.")
        longest = SHAPES[self.shape]["max_position_embeddings"]
        if self.prompt + self.new_tokens > longest or self.document > longest:
            found = f"{self.prompt} + {self.new_tokens}, {self.document} tokens"
            raise InputError("prompt, new_tokens, document", found, f"{longest} at most, the context", "Lower them.")
        check_device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if torch.device(self.device).type == "cpu" else torch.bfloat16


@dataclass(frozen=True)
class Machine:
    """Bytes per second of a copy, reads and writes counted; FLOP/s of large products."""

    bandwidth: float
    flops: float

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
        return cls(best, measured_peak(device, config.dtype, clock))

    def seconds(self, weight_bytes: float, inputs: int, cache_bytes: float = 0.0) -> float:
        """The least that a call takes: a product reads each of its weights once, and multiplies it with every input."""
        products = 2 * weight_bytes / self.itemsize * inputs
        return max((weight_bytes + cache_bytes) / self.bandwidth, products / self.flops)

    itemsize: int = 2


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
        heads = {"eagle": random_eagle_head(target), "eagle3": random_eagle3_head(target)}
        models = Models(target, small.lean(packed=False), heads=heads, capacity=config.prompt + config.new_tokens + 8)
        read = {kind: sum(weight.nbytes for weight in head.parameters()) for kind, head in heads.items()}
        read["eagle"] += weights.state["lm_head.weight"].nbytes  # its own is the target's
        llama = target.config
        cached = 2 * llama.num_layers * llama.num_kv_heads * llama.head_dim * config.dtype.itemsize
        drafts = {"draft": small.forward_bytes, **read}
        return cls(weights.raw, models, weights.forward_bytes, drafts, cached)


def random_eagle3_head(target: LlamaLM) -> DraftHead:
    """Return an untrained EAGLE-3 head of the target's shape with the default draft vocabulary."""
    torch.manual_seed(0)
    drafter: Any = head_class("eagle3")
    head = drafter(drafter.new_config(drafter.Settings(), target.config))
    return head.to(target.device, target.dtype).eval().requires_grad_(False)


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
def timed_rounds(config: GpuReportConfig, models: Models, name: str, rows: int) -> tuple[float, list[Generation]]:
    """Return the responses, and their seconds without those of the first tokens."""
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
        if rows == 1:
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


def lean_layer(config: GpuReportConfig, subjects: Subjects, machine: Machine) -> Iterator[Measured]:
    """Measure a decoder layer of a decode step, as the decoder runs it and compiled, both replayed as graphs."""
    for rows in map(int, config.batches.split(",")):
        eager, compiled, ideal, difference = timed_layer(config, subjects, machine, rows)
        where = f"a layer, {rows} row{'s' * (rows > 1)}"
        yield Measured(f"{where}: eager", 1e6 * eager, "us")
        yield Measured(f"{where}: achieved / ideal", ideal / eager)
        yield Measured(f"{where}: compiled / eager, time", compiled / eager, "x")
        yield Measured(f"{where}: compiled, difference from eager", 100 * difference, "%", "< 1")


@torch.no_grad()
def timed_layer(
    config: GpuReportConfig, subjects: Subjects, machine: Machine, rows: int
) -> tuple[float, float, float, float]:
    """Return the seconds of layer 0 over a cache, eager, compiled and ideal, and how far the outputs differ."""
    target: Any = subjects.models.target
    stack, layer = target.stack, target.stack.layers[0]
    cache = stack.new_cache(rows, config.prompt + 1)
    cache.length = config.prompt
    cos, sin = (table[config.prompt : config.prompt + 1] for table in (stack.cos, stack.sin))
    groups = target.config.num_heads // target.config.num_kv_heads
    attention = CachedAttention(cache, rows, groups, None, False)
    x = torch.randn(rows, target.config.hidden_size, device=target.device, dtype=target.dtype)

    def step(x: Tensor) -> tuple[Tensor]:
        return (layer(x, cos, sin, attention),)

    compiled: Any = torch.compile(step, backend=config.compiler)
    (plain,), (other,) = step(x), compiled(x)
    graphs = {"eager": Graphed(step), "compiled": Graphed(compiled)}
    calls = {name: partial(lambda own: [own(x) for _ in range(LAYER_CALLS)], own) for name, own in graphs.items()}
    taken = interleaved(calls, max(3, config.repeats), clock_of(config.device, 1))
    eager, fused = (statistics.median(taken[name]) / LAYER_CALLS for name in graphs)
    read = sum(own.weight.nbytes for own in (layer.qkv, layer.o, layer.gate_up, layer.down))
    ideal = machine.seconds(read, rows, rows * config.prompt * subjects.token_bytes / len(stack.layers))
    return eager, fused, ideal, float((plain - other).float().norm() / plain.float().norm())


@dataclass(frozen=True)
class Steps:
    """Numbers of a training's steps after the warm-up, its mean loss, and the memory that `--plan` says, in bytes."""

    costs: dict[str, float]
    loss: float
    planned: int

    @property
    def ms(self) -> float:
        return 1e3 / self.costs["steps_per_s"]

    def rows(self, what: str) -> Iterator[Measured]:
        memory = self.costs["memory_gb"]
        yield Measured(f"{what}: a step", self.ms, "ms")
        yield Measured(f"{what}: tokens a second", self.costs["tokens_per_s"], "tokens/s")
        yield Measured(f"{what}: waiting for data", 100 * self.costs["data_wait"], "%", "< 2")
        yield Measured(f"{what}: peak memory", memory, "GB")
        yield Measured(f"{what}: peak memory, planned / measured", self.planned / 1e9 / memory, "", "0.9 to 1.1")


def take_steps(
    config: GpuReportConfig, raw: dict[str, Any], target: LlamaLM, kind: str, compiled: bool = False, **options: Any
) -> Steps:
    """Run some steps of `draftsmith train KIND` with online features. compiled: the head's passes, by torch.compile."""
    steps, device = WARM_UP + TIMED, torch.device(config.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory(prefix="draftsmith-gpu-") as folder:
        settings = training_settings(config, Path(folder), steps, raw, kind, **options)
        module, data = training_objects(config, settings, target, steps)
        if compiled:
            module.head.unroll = torch.compile(module.head.unroll, backend=config.compiler)
        fit(module, data, limit_val_batches=0)
        costs = {name.removeprefix("cost/"): value for name, value in module.logged.items() if name.startswith("cost/")}
        return Steps(costs, module.logged["train/loss"], plan_of(settings).peak)


def trainings(
    config: GpuReportConfig, raw: dict[str, Any], target: LlamaLM
) -> dict[str, Callable[[], Iterator[Measured]]]:
    """Return the sections that train an EAGLE-3 head and what is compared with it; it is trained once."""
    done: list[Steps] = []

    def eagle3() -> Steps:
        if not done:
            done.append(take_steps(config, raw, target, "eagle3", ttt_steps=config.ttt_steps))
        return done[0]

    def training() -> Iterator[Measured]:
        what = f"eagle3, {config.ttt_steps} ttt_steps"
        yield from eagle3().rows(what)
        peak = measured_peak(torch.device(config.device), config.dtype)
        share = 100e12 * eagle3().costs["tflops"] / peak
        yield Measured(f"{what}: model FLOPs of what the device could do", share, "%", ">= 50")

    def dspark() -> Iterator[Measured]:
        anchors = max(1, PACK_BLOCKS * config.document // PACK)
        own, other = take_steps(config, raw, target, "dspark", anchors=anchors, **DSPARK), eagle3()
        what = f"dspark, {anchors} blocks a text"
        yield from own.rows(what)
        yield Measured(f"{what}: a step / one of eagle3, {config.ttt_steps} ttt_steps", own.ms / other.ms, "x")

    def compiled() -> Iterator[Measured]:
        own = take_steps(config, raw, target, "eagle3", compiled=True, ttt_steps=config.ttt_steps)
        yield Measured("eagle3, compiled / eager: a step", own.ms / eagle3().ms, "x")
        yield Measured("eagle3, compiled / eager: loss", own.loss / eagle3().loss, "", "0.99 to 1.01")
        yield Measured("eagle3, compiled: peak memory", own.costs["memory_gb"], "GB")

    return {"training": training, "dspark": dspark, "compiled": compiled}


# -- ranks


def ranks(config: GpuReportConfig) -> Iterator[Measured]:
    """Compare steps of an EAGLE head on a small target, by every strategy, with those of one process."""
    small = dataclasses.replace(config, shape="tiny" if torch.device(config.device).type == "cpu" else "88m")
    weights, _ = random_pair(small.shape, small.dtype, small.device)
    alone = take_steps(small, weights.raw, weights.lean(packed=False), "eagle")
    yield Measured("eagle, one process: a step", alone.ms, "ms")
    names = ("ddp", *(ZERO if importlib.util.find_spec("deepspeed") else ()))
    for world in (1, 2):
        with tempfile.TemporaryDirectory(prefix="draftsmith-ranks-") as folder:
            launch_ranks(small, names, world, Path(folder))
            for name in names:
                where = f"eagle, {name}, {world} rank{'s over gloo' * (world > 1)}"
                file = Path(folder) / f"{name}.json"
                found = json.loads(file.read_text()) if file.exists() else None
                yield Measured(f"{where}: ran", float(found is not None), "", "1")
                if found is not None:
                    yield Measured(f"{where}: a step", found["ms"], "ms")
                    yield Measured(
                        f"{where}: loss / that of one process", found["loss"] / alone.loss, "", "0.99 to 1.01"
                    )


def launch_ranks(config: GpuReportConfig, names: Sequence[str], world: int, folder: Path) -> None:
    """Run so many ranks on one device, to the end or until one fails or all hang. Each strategy leaves a file."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=run_rank, args=(config, names, rank, world, port, folder)) for rank in range(world)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + RANKS_S
    while any(process.is_alive() for process in started):
        if time.monotonic() > deadline or any(process.exitcode for process in started):
            for process in started:
                process.kill()
        time.sleep(0.1)


def run_rank(config: GpuReportConfig, names: Sequence[str], rank: int, world: int, port: int, folder: Path) -> None:
    """Take steps by one strategy after the other. To Lightning each rank is a machine of one device: they share it."""
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    torch.set_num_threads(1)
    weights, _ = random_pair(config.shape, config.dtype, config.device)
    target, strategy_of = weights.lean(packed=False), strategies._strategy

    def over_gloo(*args: Any) -> Any:
        # NCCL refuses two ranks on one device.
        strategy = strategy_of(*args)
        strategy._process_group_backend = "gloo"
        return strategy

    with mock.patch.object(strategies, "_strategy", over_gloo if world > 1 else strategy_of):
        for name in names:
            steps = take_steps(config, weights.raw, target, "eagle", strategy=name)
            if rank == 0:
                write_json(folder / f"{name}.json", {"ms": steps.ms, "loss": steps.loss})
    # DeepSpeed sometimes aborts an interpreter that ends.
    os._exit(0)


def training_settings(
    config: GpuReportConfig, folder: Path, steps: int, raw: dict[str, Any], kind: str, **options: Any
) -> Any:
    """Return the training's options. The target's directory has only a config.json, for the plan."""
    make_directory(folder / "target")
    dtype = str(config.dtype).removeprefix("torch.")
    write_json(folder / "target" / "config.json", {**raw, "torch_dtype": dtype})
    made: Any = drafter_config(kind)
    return resolve_precision(
        made(
            target=str(folder / "target"),
            data=folder / "data",
            output=folder / "run",
            tokens_per_batch=config.tokens,
            max_steps=steps,
            num_workers=config.num_workers,
            accelerator="gpu" if torch.device(config.device).type == "cuda" else "cpu",
            tau_prompts=0,
            plan_ranks=1,
            plan_samples=2 * steps * (config.tokens // config.document),
            plan_length=config.document,
            log_every=steps,
            loggers=("csv",),
            **options,
        )
    )


class TimedDrafter(LitDrafter):
    """Drafter in training whose costs are those of the steps after the warm-up."""

    def training_step(self, parts: Any, batch_idx: int) -> None:
        super().training_step(parts, batch_idx)
        if self.trainer.global_step == WARM_UP:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.telemetry.take(self.device)


def training_objects(config: GpuReportConfig, settings: Any, target: LlamaLM, steps: int) -> tuple[Any, Any]:
    """Module and data as `train.prepare.prepare` makes them, of what is in memory."""
    drafter: Any = settings.drafter
    torch.manual_seed(0)
    head = drafter(drafter.new_config(settings, target.config))
    head.freeze(settings)
    texts = Texts(steps * (config.tokens // config.document), config.document, target.info.vocab_size)
    samples = Samples(texts, range(len(texts)))
    module = TimedDrafter(head, target, settings)
    module.telemetry = Telemetry(count_flops=True)
    return module, HeadDataModule(samples, samples, settings)


BEFORE = {"decoding": decoding, "layer": lean_layer}


def section(name: str, rows: Callable[[], Iterator[Measured]]) -> Iterator[Measured]:
    """Yield a section's rows, then its seconds and whether it came to its end."""
    began, ran = time.monotonic(), 0.0
    try:
        yield from rows()
        ran = 1.0
    except Exception:  # whatever it is, the other sections are still worth the device's time
        log_note(traceback.format_exc())
    yield Measured(f"section {name}: seconds", time.monotonic() - began, "s")
    yield Measured(f"section {name}: ran", ran, "", "1")


def measure_all(config: GpuReportConfig) -> Iterator[Measured]:
    machine = dataclasses.replace(Machine.of(config), itemsize=config.dtype.itemsize)
    yield Measured("a copy's bandwidth, read and written", machine.bandwidth / 1e9, "GB/s")
    yield Measured("large products", machine.flops / 1e12, "TFLOP/s")
    subjects = Subjects.of(config)
    raw, target, wanted = subjects.raw, subjects.models.target, config.sections.split(",")
    assert isinstance(target, LlamaLM)
    deadline = time.monotonic() + 60 * config.minutes
    parts: dict[str, Callable[[], Iterator[Measured]]]
    parts = {name: partial(measure, config, subjects, machine) for name, measure in BEFORE.items()}
    del subjects  # drafts and heads of the decoding take no room in the training
    parts |= {**trainings(config, raw, target), "ranks": partial(ranks, config)}
    for name in SECTIONS:
        rows = parts.pop(name)
        if name in wanted and time.monotonic() < deadline:
            yield from section(name, rows)
        elif name in wanted:
            yield Measured(f"section {name}: ran", 0.0, "", "1")
        del rows


@sole_writer()
def run(config: GpuReportConfig) -> Path:
    """Measure, print every row as it comes, write gpu.json and gpu.md; return the directory."""
    if torch.device(config.device).type == "cpu":
        torch.set_num_threads(1)
    return report(config, "gpu", measure_all(config), describe_run(config, config.device))


if __name__ == "__main__":
    sys.exit(main_of(GpuReportConfig, run))

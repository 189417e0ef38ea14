"""Measure the decoder's own cost in ratios: `python benchmarks/latency.py --output DIR`.

Every ratio is taken in one process, interleaved, as a median of paired runs; on a CPU with one thread and process CPU
time. The models are random ones of a real size (synthetic.py) and the embedded pair. This is the time that the decoder
adds to its models' forwards; `draftsmith eval bench` measures what heads gain.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from draftsmith.benchmarks.hf_generate import HFRunner, load_hf_model
from draftsmith.benchmarks.measured import Measured, describe_run, report
from draftsmith.benchmarks.synthetic import random_eagle_head, random_pair
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.bench.runner import EngineRunner, Runner
from draftsmith.eval.clock import Clock, Stopwatch, clock_of, interleaved, medians
from draftsmith.launch.cli import main_of
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.trace import DecodeStep
from draftsmith.modules.decoding.tree import DynamicTree
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.feature_heads import PairNetwork
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.engine.lean import can_pack
from draftsmith.modules.engine.rows import OneRow
from draftsmith.modules.pretrained.models import DTYPES, check_device, load_lm
from draftsmith.modules.targets.base import Session
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams, check_range

K = 5
TREE = DynamicTree(nodes=60, depth=6, topk=10)
GREEDY = SamplingParams()
RANDOM_PROMPT = 64  # tokens
TREE_ROUNDS = 16


@dataclass(frozen=True)
class LatencyConfig:
    """Measures the decoder's own cost against transformers and against the sum of its forwards.

    Attributes:
        output: Directory that receives latency.json and latency.md.
        device: cpu, cuda, cuda:1, ...
        shape: Random pair: 88m, llama-3-8b (16 GB in bfloat16; for a GPU), or tiny (computes next to nothing).
        dtypes: float32, bfloat16 or both, separated by a comma.
        embedded: Measure the embedded pair too (float32, CPU).
        long_context: Tokens of the long prompt; 0 leaves it out.
        new_tokens: Tokens of a response.
        repeats: Paired runs of which the median counts.
    """

    output: Path = field(kw_only=True)
    device: str = "cpu"
    shape: Literal["88m", "llama-3-8b", "tiny"] = "88m"
    dtypes: str = "float32,bfloat16"
    embedded: bool = True
    long_context: int = 4000
    new_tokens: int = 64
    repeats: int = 5

    def __post_init__(self) -> None:
        for name, smallest in (("new_tokens", 4 * K), ("repeats", 1), ("long_context", 0)):
            check_range(name, getattr(self, name), smallest)
        for dtype in self.dtypes.split(","):
            if dtype not in DTYPES:
                raise InputError("dtypes", dtype, "float32, bfloat16 or both", "Correct it.")
        check_device(self.device)


def paired_ratio(slower: list[float], faster: list[float]) -> float:
    """Return the median over repeats of slower / faster."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def timed_copy(lm: LlamaLM, forwards: Stopwatch) -> LlamaLM:
    """Return the model with all multiplications with its weights timed, and none of the decoder's own work."""
    copied = copy.copy(lm)
    for name in ("embed", "norm", "lm_head"):
        setattr(copied, name, forwards.timed(getattr(lm, name)))
    copied.stack = timed_stack(lm.stack, forwards)
    return copied


def timed_stack(stack: Any, forwards: Stopwatch) -> Any:
    copied = copy.copy(stack)
    copied.run = forwards.timed(stack.run)
    return copied


@dataclass(frozen=True)
class Pair:
    """A target and its draft model in our engine and in transformers, with prompts.

    load() returns them in our engine, load_hf() in transformers.
    """

    name: str
    load: Callable[[], tuple[Any, Any]]
    load_hf: Callable[[], tuple[Any, Any]]
    prompts: list[list[int]]
    new_tokens: int
    clock: Clock

    @classmethod
    def random(cls, shape: str, dtype: str, device: str, new_tokens: int, clock: Clock) -> Pair:
        """Return a random pair, whose weights are shared by our engine and transformers."""
        target, draft = random_pair(shape, DTYPES[dtype], device)
        torch.manual_seed(0)
        prompt = torch.randint(target.config.vocab_size, (RANDOM_PROMPT,)).tolist()
        return cls(
            f"{shape} {dtype}",
            lambda: (target.lean(True), draft.lean(True)),
            lambda: (target.transformers(), draft.transformers()),
            [prompt], new_tokens, clock,
        )  # fmt: skip

    @classmethod
    def embedded(cls, new_tokens: int, clock: Clock) -> Pair:
        """Return the shipped pair on some of its test prompts."""
        paths = ("embedded:target", "embedded:draft")
        prompts = [row.prompt_ids for row in read_prompts("embedded:prompts", paths[0], "test", None, 4)]

        def load() -> tuple[Any, Any]:
            return load_lm(paths[0], packed=True), load_lm(paths[1], packed=True)

        def load_hf() -> tuple[Any, Any]:
            return load_hf_model(paths[0], "float32", "cpu"), load_hf_model(paths[1], "float32", "cpu")

        return cls("embedded float32", load, load_hf, prompts, new_tokens, clock)

    @cached_property
    def packed(self) -> tuple[LlamaLM, LlamaLM]:
        return self.load()

    @property
    def capacity(self) -> int:
        return max(map(len, self.prompts)) + self.new_tokens + 2 * TREE.nodes

    @cached_property
    def session(self) -> Session | None:
        """On a GPU one session serves all runs, for the graphs that it holds."""
        target = self.packed[0]
        return target.session(1, self.capacity) if target.device.type == "cuda" else None

    def chain(self, models: tuple[LlamaLM, LlamaLM]) -> EngineRunner:
        drafter = ChainDrafter(DraftModelNet(models[1]), FixedLengthStop(K), self.capacity)
        return EngineRunner(models[0], drafter, GREEDY, (), session=self.session)

    def timed_chain(self, forwards: Stopwatch) -> EngineRunner:
        target, draft = (timed_copy(lm, forwards) for lm in self.packed)
        return self.chain((target, draft))

    @cached_property
    def head(self) -> Any:
        return random_eagle_head(self.packed[0])

    def tree(self, forwards: Stopwatch | None = None) -> EngineRunner:
        """forwards: times all forwards of the target and the head."""
        target = self.packed[0] if forwards is None else timed_copy(self.packed[0], forwards)
        net = self.head.net(target)
        drafter = TreeDrafter(net, TREE, self.capacity)
        if forwards is not None:
            assert isinstance(net.cache, OneRow)
            net.cache.stack = timed_stack(net.cache.stack, forwards)
        return EngineRunner(target, drafter, GREEDY, (), session=self.session)

    def answer(self, runner: Runner) -> Callable[[], None]:
        """Return a call that answers all prompts."""

        def call() -> None:
            for seed, prompt in enumerate(self.prompts):
                runner(prompt, self.new_tokens, seed)

        return call


@dataclass(frozen=True)
class RoundTime:
    """Seconds of one round and of its forwards, its counts and those of the round before."""

    seconds: float
    forward_s: float
    step: DecodeStep
    before: DecodeStep


def steady_rounds(pair: Pair, runner: EngineRunner, forwards: Stopwatch) -> list[RoundTime]:
    """Return the rounds of one response, without the first, which reads the prompt, and without shortened drafts."""
    marks: list[tuple[float, float]] = []

    def mark(done: Round) -> None:
        marks.append((pair.clock(), forwards.seconds))

    # An untrained head's trees are hardly ever accepted: nearly every token is a round.
    new_tokens = TREE_ROUNDS if isinstance(runner.drafter, TreeDrafter) else pair.new_tokens
    steps = replace(runner, on_round=mark)(pair.prompts[0], new_tokens, 0).trace.steps
    rounds = [
        RoundTime(end[0] - start[0], end[1] - start[1], step, before)
        for start, end, step, before in zip(marks[1:], marks[2:], steps[1:], steps, strict=False)
    ]
    whole = max(step.num_drafted for step in steps)
    return [done for done in rounds if done.step.num_drafted == whole]


class ForwardCosts:
    """Seconds of forwards by the number of tokens they read, in the middle of a response; measured when asked."""

    def __init__(self, pair: Pair):
        self._pair, self._known = pair, dict[tuple[str, int], float]()
        self._context = len(pair.prompts[0]) + pair.new_tokens // 2

    def __call__(self, model: Literal["target", "draft", "head"], size: int) -> float:
        if (model, size) not in self._known:
            read = self._level(size) if model == "head" else self._reading(model, size)
            self._known[model, size] = medians({"forward": read}, 7, self._pair.clock)["forward"]
        return self._known[model, size]

    def _reading(self, model: str, size: int) -> Callable[[], None]:
        lm = self._pair.packed[("target", "draft").index(model)]
        session = lm.session(1, self._pair.capacity)
        session.extend([[1] * self._context])

        def read() -> None:
            session.extend([[1] * size], logits_to_keep=size)
            session.keep([self._context])

        return read

    @torch.inference_mode()
    def _level(self, size: int) -> Callable[[], None]:
        """One level of the EAGLE head, with the logits of all rows."""
        target = self._pair.packed[0]
        network = PairNetwork(self._pair.head, target)
        stack = network.stack
        cache = stack.new_cache(1, self._pair.capacity)
        cache.length = self._context
        tokens = torch.ones(size, dtype=torch.int64, device=target.device)
        features = target.embed(tokens)
        visible = torch.ones(size, self._context + size, dtype=torch.bool, device=target.device)
        cos, sin = stack.cos[self._context], stack.sin[self._context]

        @torch.inference_mode()
        def read() -> None:
            target.lm_head(stack.run(network.inputs(tokens, features), cos, sin, cache, visible, False))

        return read


def end_to_end(pair: Pair, repeats: int) -> Iterator[Measured]:
    """Compare tokens per second with transformers' `generate`: same weights, prompts and number of tokens."""
    hf_target, hf_draft = pair.load_hf()
    runners: dict[str, Runner] = {
        "hf": HFRunner(hf_target, GREEDY, ()),
        "hf-assisted": HFRunner(hf_target, GREEDY, (), hf_draft, K),
        "ar": EngineRunner(pair.packed[0], None, GREEDY, ()),
        "spec": pair.chain(pair.packed),
    }
    with torch.inference_mode():
        seconds = interleaved({name: pair.answer(run) for name, run in runners.items()}, repeats, pair.clock)
    assisted = f"transformers' assisted generation, K={K}"
    rows = [
        ("ar / transformers' generate", "hf", "ar", ">= 1.6"),
        (f"spec:k={K} / {assisted}", "hf-assisted", "spec", ">= 1.9" if "bfloat16" in pair.name else ">= 2.0"),
        (f"{assisted} / its generate", "hf", "hf-assisted", ""),
    ]
    for what, slower, faster, aim in rows:
        yield Measured(what, paired_ratio(seconds[slower], seconds[faster]), "x", aim, pair.name)


def overheads(pair: Pair, repeats: int) -> Iterator[Measured]:
    """Measure the time of a greedy round beyond its forwards."""
    shares: dict[str, list[float]] = {"chain": [], "tree": []}
    for _ in range(repeats):
        one_token = ForwardCosts(pair)("target", 1)
        forwards = Stopwatch(pair.clock)
        for name, runner in (("chain", pair.timed_chain(forwards)), ("tree", pair.tree(forwards))):
            rounds = steady_rounds(pair, runner, forwards)
            extra = sum(done.seconds - done.forward_s for done in rounds)
            whole = len(rounds) * one_token if name == "chain" else sum(done.forward_s for done in rounds)
            shares[name].append(100 * extra / whole)
    chain, tree = (statistics.median(shares[name]) for name in ("chain", "tree"))
    yield Measured(f"a spec:k={K} round beyond its forwards, of a target forward", chain, "%", "<= 6", models=pair.name)
    yield Measured("an eagle-tree round, 60 nodes, beyond its forwards, of these", tree, "%", "<= 5", models=pair.name)


def ideals(pair: Pair, repeats: int) -> Iterator[Measured]:
    """Compare tokens per second with what the forwards alone allow, by their cost at the same context."""
    shares: dict[str, list[float]] = {"chain": [], "tree": []}
    for _ in range(repeats):
        costs = ForwardCosts(pair)
        for name, runner in (("chain", pair.chain(pair.packed)), ("tree", pair.tree())):
            ideal = taken = 0.0
            for done in steady_rounds(pair, runner, Stopwatch(pair.clock)):
                later = done.step.draft_calls - 1
                ideal += costs("target", done.step.num_drafted + 1)
                # The drafter first reads what it has not read of the round before.
                if name == "tree":
                    ideal += costs("head", done.before.num_emitted) + later * costs("head", TREE.topk)
                else:
                    unread = 2 if done.before.num_accepted == done.before.num_drafted else 1
                    ideal += costs("draft", unread) + later * costs("draft", 1)
                taken += done.seconds
            shares[name].append(ideal / taken)
    for name, label in (("chain", f"spec:k={K}"), ("tree", "eagle-tree, 60 nodes")):
        share = statistics.median(shares[name])
        yield Measured(f"achieved / ideal tokens per second, {label}", share, "", ">= 0.95", models=pair.name)
    one = costs("target", 1)
    for size in (K + 1, TREE.nodes + 1):
        yield Measured(f"reading {size} tokens / reading one", costs("target", size) / one, "x", models=pair.name)
    yield Measured("a draft step / reading one token", costs("draft", 1) / one, "x", models=pair.name)


def long_context(pair: Pair, tokens: int, repeats: int) -> Iterator[Measured]:
    """Compare the time of a round beyond its forwards after a long prompt with that after a short one."""
    length = min(tokens, pair.packed[0].info.max_position - pair.new_tokens - 1)
    prompt = (pair.prompts[0] * (length // len(pair.prompts[0]) + 1))[:length]
    longer = replace(pair, prompts=[prompt], load=lambda: pair.packed)
    for label in (f"spec:k={K}", "eagle-tree, 60 nodes"):
        extra: dict[int, list[float]] = {len(pair.prompts[0]): [], length: []}
        for _ in range(repeats):
            for own in (pair, longer):
                forwards = Stopwatch(pair.clock)
                runner = own.tree(forwards) if "eagle-tree" in label else own.timed_chain(forwards)
                rounds = steady_rounds(own, runner, forwards)
                extra[len(own.prompts[0])].append(statistics.median(done.seconds - done.forward_s for done in rounds))
        short_s, long_s = (statistics.median(values) for values in extra.values())
        what = f"{label}: a round beyond its forwards, {length} tokens of context / {len(pair.prompts[0])}"
        yield Measured(what, long_s / short_s, "x", "1", models=pair.name)


def measure_all(config: LatencyConfig) -> Iterator[Measured]:
    clock = clock_of(config.device, 1)
    on_cpu = torch.device(config.device).type == "cpu"
    if config.embedded and on_cpu:
        pair = Pair.embedded(config.new_tokens, clock)
        for part in (end_to_end, overheads, ideals):
            yield from part(pair, config.repeats)
    for dtype in config.dtypes.split(","):
        pair = Pair.random(config.shape, dtype, config.device, config.new_tokens, clock)
        for part in (ideals, *((end_to_end, overheads) if on_cpu else ())):
            yield from part(pair, config.repeats)
        if on_cpu and config.long_context and dtype == "float32":  # reading it takes long
            yield from long_context(pair, config.long_context, min(config.repeats, 2))


@sole_writer()
def run(config: LatencyConfig) -> Path:
    """Measure, print every row as it comes, write latency.json and latency.md; return the directory."""
    torch.set_num_threads(1)
    packed = {dtype: can_pack(DTYPES[dtype]) for dtype in config.dtypes.split(",")}
    return report(config, "latency", measure_all(config), describe_run(config, config.device) | {"packed": packed})


if __name__ == "__main__":
    sys.exit(main_of(LatencyConfig, run))

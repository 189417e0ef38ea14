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
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from draftsmith.benchmarks.synthetic import random_eagle_head, random_pair
from draftsmith.data.console import log_note, markdown_lines, print_table, table_from_cells
from draftsmith.data.store.manifest import resolved
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.hf_baseline import HFRunner, load_hf_model
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.bench.runner import EngineRunner, Runner
from draftsmith.eval.bench.trace import traced
from draftsmith.eval.clock import Clock, Stopwatch, clock_of, interleaved, medians
from draftsmith.eval.meta import hardware
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
from draftsmith.modules.pretrained.files import make_directory, write_json, write_text
from draftsmith.modules.pretrained.models import DTYPES, check_device, load_lm
from draftsmith.modules.pretrained.provenance import git_commit, package_versions
from draftsmith.modules.targets.base import Session
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams, check_range

HEADINGS = ("what", "models", "value", "aim")
K = 5
TREE = DynamicTree(nodes=60, depth=6, topk=10)
GREEDY, SAMPLING = SamplingParams(0.0), SamplingParams(1.0)
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


@dataclass(frozen=True)
class Number:
    """A measured number in `unit` (x, %, us or nothing) with its aim."""

    what: str
    models: str
    value: float
    unit: str
    aim: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        digits = {"x": 2, "%": 1, "us": 0}.get(self.unit, 3)
        return self.what, self.models, f"{self.value:.{digits}f}{' ' if self.unit == 'us' else ''}{self.unit}", self.aim


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
    """A target and its draft model in both layouts of their weights and in transformers, with prompts.

    load(packed) returns them in our engine, load_hf() in transformers. weight_bytes: read by a forward of the target,
    if they exceed the caches.
    """

    name: str
    load: Callable[[bool], tuple[Any, Any]]
    load_hf: Callable[[], tuple[Any, Any]]
    prompts: list[list[int]]
    new_tokens: int
    clock: Clock
    weight_bytes: int | None = None

    @classmethod
    def random(cls, shape: str, dtype: str, device: str, new_tokens: int, clock: Clock) -> Pair:
        """Return a random pair, whose weights are shared by our engine and transformers."""
        target, draft = random_pair(shape, DTYPES[dtype], device)
        torch.manual_seed(0)
        prompt = torch.randint(target.config.vocab_size, (RANDOM_PROMPT,)).tolist()
        return cls(
            f"{shape} {dtype}",
            lambda packed: (target.lean(packed), draft.lean(packed)),
            lambda: (target.transformers(), draft.transformers()),
            [prompt], new_tokens, clock, target.forward_bytes,
        )  # fmt: skip

    @classmethod
    def embedded(cls, new_tokens: int, clock: Clock) -> Pair:
        """Return the shipped pair on some of its test prompts."""
        paths = ("embedded:target", "embedded:draft")
        prompts = [row.prompt_ids for row in read_prompts("embedded:prompts", paths[0], "test", None, 4)]

        def load(packed: bool) -> tuple[Any, Any]:
            return load_lm(paths[0], packed=packed), load_lm(paths[1], packed=packed)

        def load_hf() -> tuple[Any, Any]:
            return load_hf_model(paths[0], "float32", "cpu"), load_hf_model(paths[1], "float32", "cpu")

        return cls("embedded float32", load, load_hf, prompts, new_tokens, clock)

    @cached_property
    def packed(self) -> tuple[LlamaLM, LlamaLM]:
        return self.load(True)

    @property
    def capacity(self) -> int:
        return max(map(len, self.prompts)) + self.new_tokens + 2 * TREE.nodes

    @cached_property
    def session(self) -> Session | None:
        """On a GPU one session serves all runs, for the graphs that it holds."""
        target = self.packed[0]
        return target.session(1, self.capacity) if target.device.type == "cuda" else None

    def chain(self, models: tuple[LlamaLM, LlamaLM], params: SamplingParams) -> EngineRunner:
        drafter = ChainDrafter(DraftModelNet(models[1]), [FixedLengthStop(K)], self.capacity)
        return EngineRunner(models[0], drafter, params, (), session=self.session)

    def timed_chain(self, params: SamplingParams, forwards: Stopwatch) -> EngineRunner:
        target, draft = (timed_copy(lm, forwards) for lm in self.packed)
        return self.chain((target, draft), params)

    @cached_property
    def head(self) -> Any:
        return random_eagle_head(self.packed[0])

    def tree(self, params: SamplingParams, forwards: Stopwatch | None = None) -> EngineRunner:
        """forwards: times all forwards of the target and the head."""
        target = self.packed[0] if forwards is None else timed_copy(self.packed[0], forwards)
        net = self.head.net(target)
        drafter = TreeDrafter(net, TREE, self.capacity)
        if forwards is not None:
            assert isinstance(net.cache, OneRow)
            net.cache.stack = timed_stack(net.cache.stack, forwards)
        return EngineRunner(target, drafter, params, (), session=self.session)

    def answer(self, runner: Runner) -> Callable[[], None]:
        """Return a call that answers all prompts."""

        def call() -> None:
            for seed, prompt in enumerate(self.prompts):
                runner([prompt], self.new_tokens, [seed])

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
    steps = replace(runner, on_round=mark)([pair.prompts[0]], new_tokens, [0])[0].trace.steps
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


def end_to_end(pair: Pair, repeats: int) -> Iterator[Number]:
    """Compare tokens per second with transformers' `generate`: same weights, prompts and number of tokens."""
    hf_target, hf_draft = pair.load_hf()
    plain = pair.load(False)
    runners: dict[str, Runner] = {
        "hf": HFRunner(hf_target, GREEDY, ()),
        "hf-assisted": HFRunner(hf_target, GREEDY, (), hf_draft, K),
        "ar": EngineRunner(pair.packed[0], None, GREEDY, ()),
        "spec": pair.chain(pair.packed, GREEDY),
        "ar, plain": EngineRunner(plain[0], None, GREEDY, ()),
        "spec, plain": pair.chain(plain, GREEDY),
    }
    with torch.inference_mode():
        seconds = interleaved({name: pair.answer(run) for name, run in runners.items()}, repeats, pair.clock)
    assisted = f"transformers' assisted generation, K={K}"
    rows = [
        ("ar / transformers' generate", "hf", "ar", ">= 1.6"),
        (f"spec:k={K} / {assisted}", "hf-assisted", "spec", ">= 1.9" if "bfloat16" in pair.name else ">= 2.0"),
        (f"the same without packed kernels / {assisted}", "hf-assisted", "spec, plain", ">= 1.1"),
        ("ar with packed kernels / without", "ar, plain", "ar", ""),
        ("spec with packed kernels / without", "spec, plain", "spec", ""),
        (f"{assisted} / its generate", "hf", "hf-assisted", ""),
    ]
    for what, slower, faster, aim in rows:
        yield Number(what, pair.name, paired_ratio(seconds[slower], seconds[faster]), "x", aim)


def overheads(pair: Pair, repeats: int) -> Iterator[Number]:
    """Measure the time of a round beyond its forwards."""
    for mode, params, aim in (("T=0", GREEDY, "<= 6"), ("T=1", SAMPLING, "<= 12")):
        shares: dict[str, list[float]] = {"chain": [], "tree": []}
        for _ in range(repeats):
            one_token = ForwardCosts(pair)("target", 1)
            forwards = Stopwatch(pair.clock)
            for name, runner in (("chain", pair.timed_chain(params, forwards)), ("tree", pair.tree(params, forwards))):
                rounds = steady_rounds(pair, runner, forwards)
                extra = sum(done.seconds - done.forward_s for done in rounds)
                whole = len(rounds) * one_token if name == "chain" else sum(done.forward_s for done in rounds)
                shares[name].append(100 * extra / whole)
        chain, tree = (statistics.median(shares[name]) for name in ("chain", "tree"))
        yield Number(f"a spec:k={K} round beyond its forwards, {mode}, of a target forward", pair.name, chain, "%", aim)
        yield Number(
            f"an eagle-tree round, 60 nodes, beyond its forwards, {mode}, of these", pair.name, tree, "%", "<= 5"
        )


def ideals(pair: Pair, repeats: int) -> Iterator[Number]:
    """Compare tokens per second with what the forwards alone allow, by their cost at the same context."""
    shares: dict[str, list[float]] = {"chain": [], "tree": []}
    for _ in range(repeats):
        costs = ForwardCosts(pair)
        for name, runner in (("chain", pair.chain(pair.packed, GREEDY)), ("tree", pair.tree(GREEDY))):
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
        yield Number(f"achieved / ideal tokens per second, {label}", pair.name, share, "", ">= 0.95")
    one = costs("target", 1)
    for size in (K + 1, TREE.nodes + 1):
        yield Number(f"reading {size} tokens / reading one", pair.name, costs("target", size) / one, "x")
    yield Number("a draft step / reading one token", pair.name, costs("draft", 1) / one, "x")
    if pair.weight_bytes is not None:
        weights = torch.ones(pair.weight_bytes // 4, device=pair.packed[0].device)
        passing = medians({"sum": weights.sum}, 7, pair.clock)["sum"]
        yield Number("reading one token / summing as many bytes as it reads", pair.name, one / passing, "x")


def fixed_shapes(pair: Pair, repeats: int) -> Iterator[Number]:
    """Measure the path of a GPU, which runs anywhere: recurring shapes, CUDA graphs, one transfer per round."""
    (target, draft), prompt = pair.packed, pair.prompts[0]
    session = target.session(1, pair.capacity, static=True)
    drafter = ChainDrafter(DraftModelNet(draft), [FixedLengthStop(K)], pair.capacity, static=True)
    ar, spec = (EngineRunner(target, one, GREEDY, (), session=session) for one in (None, drafter))
    calls = {
        "ar": lambda: ar([prompt], pair.new_tokens, [0]),
        "spec": lambda: spec([prompt], pair.new_tokens, [0]),
        "prompt": lambda: spec([prompt], 1, [0]),
    }
    seconds = interleaved(calls, repeats, pair.clock)
    steps = spec([prompt], pair.new_tokens, [0])[0].trace.steps
    accepted = sum(step.num_accepted for step in steps) / sum(step.num_drafted for step in steps)
    what = f"fixed shapes, one sequence: spec:k={K} / ar, {accepted:.2f} of the drafted tokens accepted"
    yield Number(what, pair.name, paired_ratio(seconds["ar"], seconds["spec"]), "x")

    start = len(prompt) + pair.new_tokens // 2
    sessions = [lm.session(1, pair.capacity, static=True) for lm in (target, draft)]

    def forward(session: Session, size: int) -> float:
        def read() -> None:
            session.extend([[1] * size], logits_to_keep=size)
            session.keep([start])

        if not session.lengths[0]:
            session.extend([[1] * start])
        return medians({"forward": read}, 9, pair.clock)["forward"]

    verify = {size: forward(sessions[0], size) for size in {step.num_drafted + 1 for step in steps}}
    first, later = forward(sessions[1], 2), forward(sessions[1], 1)
    ideal = sum(verify[step.num_drafted + 1] for step in steps)
    ideal += sum(first + (step.num_drafted - 1) * later for step in steps if step.num_drafted)
    achieved = [whole - prefill for whole, prefill in zip(seconds["spec"], seconds["prompt"], strict=True)]
    what = f"fixed shapes: achieved / ideal tokens per second, spec:k={K}"
    yield Number(what, pair.name, ideal / statistics.median(achieved), "", ">= 0.9 on a GPU")


def dispatch_time(repeats: int, device: str, clock: Clock) -> Iterator[Number]:
    """Measure the host time of a layer so small that it computes next to nothing: the cost of a framework."""
    weights, _ = random_pair("tiny", torch.float32, device)
    lm, hf = weights.lean(False), weights.transformers()
    calls = 40
    session = lm.session(1, 256)
    session.extend([[1] * 64])
    prompt = torch.ones(1, 64, dtype=torch.int64, device=device)
    with torch.inference_mode():
        cache = hf(prompt, use_cache=True).past_key_values

    def ours() -> None:
        for _ in range(calls):
            session.extend([[1]])
            session.keep([64])

    @torch.inference_mode()
    def theirs() -> None:
        for _ in range(calls):
            hf(prompt[:, :1], past_key_values=cache, use_cache=True)
            cache.crop(-1)

    seconds = interleaved({"ours": ours, "theirs": theirs}, max(repeats, 5), clock)
    layers = weights.config.num_layers
    each = {name: 1e6 * statistics.median(taken) / calls / layers for name, taken in seconds.items()}
    yield Number("host time of a layer (hidden size 32, n=1)", "random", each["ours"], "us", "<= 75")
    yield Number("the same in transformers", "random", each["theirs"], "us")


def long_context(pair: Pair, tokens: int, repeats: int) -> Iterator[Number]:
    """Compare the time of a round beyond its forwards after a long prompt with that after a short one."""
    length = min(tokens, pair.packed[0].info.max_position - pair.new_tokens - 1)
    prompt = (pair.prompts[0] * (length // len(pair.prompts[0]) + 1))[:length]
    longer = replace(pair, prompts=[prompt], load=lambda packed: pair.packed)
    for label in (f"spec:k={K}", "eagle-tree, 60 nodes"):
        extra: dict[int, list[float]] = {len(pair.prompts[0]): [], length: []}
        for _ in range(repeats):
            for own in (pair, longer):
                forwards = Stopwatch(pair.clock)
                runner = own.tree(GREEDY, forwards) if "eagle-tree" in label else own.timed_chain(GREEDY, forwards)
                rounds = steady_rounds(own, runner, forwards)
                extra[len(own.prompts[0])].append(statistics.median(done.seconds - done.forward_s for done in rounds))
        short_s, long_s = (statistics.median(values) for values in extra.values())
        what = f"{label}: a round beyond its forwards, {length} tokens of context / {len(pair.prompts[0])}"
        yield Number(what, pair.name, long_s / short_s, "x", "1")


def trace_cost(pair: Pair, repeats: int) -> Iterator[Number]:
    """Measure decoding with its rounds recorded; their lines are written off the clock, after the response."""
    session = pair.session or pair.packed[0].session(1, pair.capacity)
    plain = replace(pair.chain(pair.packed, SAMPLING), session=session)

    def with_trace() -> None:
        for seed, prompt in enumerate(pair.prompts):
            traced(plain, prompt, pair.new_tokens, seed)

    seconds = interleaved({"plain": pair.answer(plain), "traced": with_trace}, 3 * repeats, pair.clock)
    cost = 100 * (paired_ratio(seconds["traced"], seconds["plain"]) - 1)
    yield Number(f"spec:k={K} with its rounds recorded, T=1, time added", pair.name, cost, "%", "<= 2")


def measure_all(config: LatencyConfig) -> Iterator[Number]:
    clock = clock_of(config.device, 1)
    on_cpu = torch.device(config.device).type == "cpu"
    yield from dispatch_time(config.repeats, config.device, clock)
    if config.embedded and on_cpu:
        pair = Pair.embedded(config.new_tokens, clock)
        for part in (end_to_end, overheads, ideals, trace_cost):
            yield from part(pair, config.repeats)
    for dtype in config.dtypes.split(","):
        pair = Pair.random(config.shape, dtype, config.device, config.new_tokens, clock)
        for part in (fixed_shapes, ideals, *((trace_cost, end_to_end, overheads) if on_cpu else ())):
            yield from part(pair, config.repeats)
        if on_cpu and config.long_context and dtype == "float32":  # reading it takes long
            yield from long_context(pair, config.long_context, min(config.repeats, 2))


@sole_writer()
def run(config: LatencyConfig) -> Path:
    """Measure, print every row as it comes, write latency.json and latency.md; return the directory."""
    torch.set_num_threads(1)
    rows = []
    for row in measure_all(config):
        rows.append(row)
        log_note(" | ".join(row.cells))
    print_table(table_from_cells("latency", HEADINGS, [row.cells for row in rows], right=HEADINGS[2:]))
    make_directory(config.output)
    meta = {
        "settings": resolved(config),
        "hardware": hardware(config.device),
        "packed": {dtype: can_pack(DTYPES[dtype]) for dtype in config.dtypes.split(",")},
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    write_text(config.output / "latency.md", "\n".join(markdown_lines(HEADINGS, [row.cells for row in rows])) + "\n")
    write_json(config.output / "latency.json", {"meta": meta, "rows": [asdict(row) for row in rows]})
    return config.output


if __name__ == "__main__":
    sys.exit(main_of(LatencyConfig, run))

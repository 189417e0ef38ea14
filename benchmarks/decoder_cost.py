"""What the decoder adds to its models' forwards: per round, by context, by tracing, and by layer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from draftsmith.benchmarks.pairs import GREEDY, SAMPLING, TREE, K, Pair, paired_ratio
from draftsmith.benchmarks.synthetic import random_pair
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.eval.bench.trace import traced
from draftsmith.eval.clock import Clock, Stopwatch, interleaved, medians
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.decoding.trace import DecodeStep
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.drafters.feature_heads import FeatureTreeDrafter
from draftsmith.modules.targets.base import Session
from draftsmith.modules.targets.llama import LlamaLM

TREE_ROUNDS = 16


@dataclass(frozen=True)
class Number:
    """One number: `value` in `unit` (x, %, us or nothing), and what is aimed at."""

    what: str
    models: str
    value: float
    unit: str
    aim: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        digits = {"x": 2, "%": 1, "us": 0}.get(self.unit, 3)
        return self.what, self.models, f"{self.value:.{digits}f}{' ' if self.unit == 'us' else ''}{self.unit}", self.aim


@dataclass(frozen=True)
class RoundTime:
    """One round: its seconds, those of them in forwards, its counts and those of the round before."""

    seconds: float
    forward_s: float
    step: DecodeStep
    before: DecodeStep


def steady_rounds(pair: Pair, runner: EngineRunner, forwards: Stopwatch) -> list[RoundTime]:
    """Rounds of one answer, without the first, in which the drafter reads the prompt, and those whose draft the
    answer's end cut short. forwards: of the runner's models, where they are timed."""
    marks: list[tuple[float, float]] = []

    def mark(done: Round) -> None:
        marks.append((pair.clock(), forwards.seconds))

    # An untrained head's trees are hardly ever accepted: nearly every token is a round.
    new_tokens = TREE_ROUNDS if isinstance(runner.drafter, FeatureTreeDrafter) else pair.new_tokens
    steps = replace(runner, on_round=mark)([pair.prompts[0]], new_tokens, [0])[0].trace.steps
    rounds = [
        RoundTime(end[0] - start[0], end[1] - start[1], step, before)
        for start, end, step, before in zip(marks[1:], marks[2:], steps[1:], steps, strict=False)
    ]
    whole = max(step.num_drafted for step in steps)
    return [done for done in rounds if done.step.num_drafted == whole]


def overheads(pair: Pair, repeats: int) -> Iterator[Number]:
    """What a round takes beyond its forwards."""
    for mode, params, aim in (("T=0", GREEDY, "<= 6"), ("T=1", SAMPLING, "<= 12")):
        shares: dict[str, list[float]] = {"chain": [], "tree": []}
        for _ in range(repeats):
            one_token = ForwardCosts(pair).target(1)
            forwards = Stopwatch(pair.clock)
            for name, runner in (("chain", pair.timed_chain(params, forwards)), ("tree", pair.tree(params, forwards))):
                rounds = steady_rounds(pair, runner, forwards)
                extra = sum(done.seconds - done.forward_s for done in rounds)
                whole = len(rounds) * one_token if name == "chain" else sum(done.forward_s for done in rounds)
                shares[name].append(100 * extra / whole)
        chain, tree = (statistics.median(shares[name]) for name in ("chain", "tree"))
        yield Number(f"a spec:k={K} round beyond its forwards, {mode}, of a target forward", pair.name, chain, "%", aim)
        yield Number(f"an eagle2 round, 60 nodes, beyond its forwards, {mode}, of these", pair.name, tree, "%", "<= 5")


class ForwardCosts:
    """Seconds of forwards by the number of tokens they read, in the middle of an answer, each measured when asked."""

    def __init__(self, pair: Pair):
        self._pair, self._known = pair, dict[tuple[str, int], float]()
        self._context = len(pair.prompts[0]) + pair.new_tokens // 2

    def target(self, size: int) -> float:
        return self._cost("target", size, lambda: self._reading(self._pair.packed[0], size))

    def draft(self, size: int) -> float:
        return self._cost("draft", size, lambda: self._reading(self._pair.packed[1], size))

    def head(self, size: int) -> float:
        """The EAGLE head's cost a step, its logits for all rows included."""
        return self._cost("head", size, lambda: self._level(self._pair.tree_drafter(), size))

    def _cost(self, model: str, size: int, make: Callable[[], Callable[[], None]]) -> float:
        if (model, size) not in self._known:
            self._known[model, size] = medians({"forward": make()}, 7, self._pair.clock)["forward"]
        return self._known[model, size]

    def _reading(self, lm: LlamaLM, size: int) -> Callable[[], None]:
        session = lm.session(1, self._pair.capacity)
        session.extend([[1] * self._context])

        def read() -> None:
            session.extend([[1] * size], num_logits=size)
            session.keep([self._context])

        return read

    @torch.inference_mode()
    def _level(self, drafter: FeatureTreeDrafter, size: int) -> Callable[[], None]:
        target, net = self._pair.packed[0], drafter.net
        stack = net.stack
        cache = stack.new_cache(1, self._pair.capacity)
        cache.length = self._context
        tokens = torch.ones(size, dtype=torch.int64, device=target.device)
        features = target.embed(tokens)
        visible = torch.ones(size, self._context + size, dtype=torch.bool, device=target.device)
        cos, sin = stack.cos[self._context], stack.sin[self._context]

        @torch.inference_mode()
        def read() -> None:
            target.lm_head(stack.run(net.fuse(tokens, features), cos, sin, cache, visible, False))

        return read


def ideals(pair: Pair, repeats: int) -> Iterator[Number]:
    """Tokens per second against what the forwards alone allow, by their own cost curve at the same context."""
    shares: dict[str, list[float]] = {"chain": [], "tree": []}
    for _ in range(repeats):
        costs = ForwardCosts(pair)
        for name, runner in (("chain", pair.chain(pair.packed, GREEDY)), ("tree", pair.tree(GREEDY))):
            rounds = steady_rounds(pair, runner, Stopwatch(pair.clock))
            ideal = sum(ideal_s(costs, done, tree=name == "tree") for done in rounds)
            shares[name].append(ideal / sum(done.seconds for done in rounds))
    for name, label in (("chain", f"spec:k={K}"), ("tree", "eagle2, 60 nodes")):
        share = statistics.median(shares[name])
        yield Number(f"achieved / ideal tokens per second, {label}", pair.name, share, "", ">= 0.95")
    for size in (K + 1, TREE.nodes + 1):
        yield Number(f"reading {size} tokens / reading one", pair.name, costs.target(size) / costs.target(1), "x")
    yield Number("a draft step / reading one token", pair.name, costs.draft(1) / costs.target(1), "x")
    if pair.weight_bytes is not None:
        weights = torch.ones(pair.weight_bytes // 4, device=pair.packed[0].device)
        passing = medians({"sum": weights.sum}, 7, pair.clock)["sum"]
        yield Number("reading one token / summing as many bytes as it reads", pair.name, costs.target(1) / passing, "x")


def ideal_s(costs: ForwardCosts, done: RoundTime, tree: bool) -> float:
    """The forwards of a round. The drafter first reads what it has not read of the round before."""
    later = done.step.draft_calls - 1
    verify = costs.target(done.step.num_drafted + 1)
    if tree:
        return verify + costs.head(done.before.num_emitted) + later * costs.head(TREE.topk)
    unread = 2 if done.before.num_accepted == done.before.num_drafted else 1
    return verify + costs.draft(unread) + later * costs.draft(1)


def fixed_shapes(pair: Pair, repeats: int) -> Iterator[Number]:
    """The path of a GPU, which runs anywhere: shapes that recur, graphs where there is CUDA, one transfer a round."""
    (target, draft), prompt = pair.packed, pair.prompts[0]
    session = target.session(1, pair.capacity, static=True)
    drafter = DraftModelDrafter(draft, [FixedLength(K)], pair.capacity, static=True)
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
    own = [lm.session(1, pair.capacity, static=True) for lm in (target, draft)]

    def forward(session: Session, size: int) -> float:
        def read() -> None:
            session.extend([[1] * size], num_logits=size)
            session.keep([start])

        if not session.lengths[0]:
            session.extend([[1] * start])
        return medians({"forward": read}, 9, pair.clock)["forward"]

    verify = {size: forward(own[0], size) for size in {step.num_drafted + 1 for step in steps}}
    first, later = forward(own[1], 2), forward(own[1], 1)
    ideal = sum(verify[step.num_drafted + 1] for step in steps)
    ideal += sum(first + (step.num_drafted - 1) * later for step in steps if step.num_drafted)
    achieved = [whole - prefill for whole, prefill in zip(seconds["spec"], seconds["prompt"], strict=True)]
    share = ideal / statistics.median(achieved)
    yield Number(
        f"fixed shapes: achieved / ideal tokens per second, spec:k={K}", pair.name, share, "", ">= 0.9 on a GPU"
    )


def dispatch_time(repeats: int, device: str, clock: Clock) -> Iterator[Number]:
    """Host time of a layer so small that it computes nothing: what a framework costs."""
    weights, _ = random_pair("tiny", torch.float32, device)
    lm, hf = weights.lean(False), weights.transformers()
    calls = 40
    session = lm.session(1, 256)
    session.extend([[1] * 64])
    prompt = torch.ones(1, 64, dtype=torch.int64, device=device)
    one = prompt[:, :1]
    with torch.inference_mode():
        cache = hf(prompt, use_cache=True).past_key_values

    def ours() -> None:
        for _ in range(calls):
            session.extend([[1]])
            session.keep([64])

    @torch.inference_mode()
    def theirs() -> None:
        for _ in range(calls):
            hf(one, past_key_values=cache, use_cache=True)
            cache.crop(-1)

    layers = weights.config.num_layers
    seconds = interleaved({"ours": ours, "theirs": theirs}, max(repeats, 5), clock)
    each = {name: 1e6 * statistics.median(taken) / calls / layers for name, taken in seconds.items()}
    yield Number("host time of a layer (hidden size 32, n=1)", "random", each["ours"], "us", "<= 75")
    yield Number("the same in transformers", "random", each["theirs"], "us")


def long_context(pair: Pair, tokens: int, repeats: int) -> Iterator[Number]:
    """What a round takes beyond its forwards at the end of a long prompt, against the same after a short one."""
    length = min(tokens, pair.packed[0].info.max_position - pair.new_tokens - 1)
    prompt = (pair.prompts[0] * (length // len(pair.prompts[0]) + 1))[:length]
    longer = replace(pair, prompts=[prompt], load=lambda packed: pair.packed)
    for label, make in (
        (f"spec:k={K}", lambda own, watch: own.timed_chain(GREEDY, watch)),
        ("eagle2, 60 nodes", lambda own, watch: own.tree(GREEDY, watch)),
    ):
        extra: dict[int, list[float]] = {len(pair.prompts[0]): [], length: []}
        for _ in range(repeats):
            for own in (pair, longer):
                forwards = Stopwatch(pair.clock)
                rounds = steady_rounds(own, make(own, forwards), forwards)
                extra[len(own.prompts[0])].append(statistics.median(done.seconds - done.forward_s for done in rounds))
        short_s, long_s = (statistics.median(found) for found in extra.values())
        what = f"{label}: a round beyond its forwards, {length} tokens of context / {len(pair.prompts[0])}"
        yield Number(what, pair.name, long_s / short_s, "x", "1")


def trace_cost(pair: Pair, repeats: int) -> Iterator[Number]:
    """Decoding with `decode --trace`; lines are worked out and written when an answer is complete, off the clock."""
    session = pair.session or pair.packed[0].session(1, pair.capacity)
    plain = replace(pair.chain(pair.packed, SAMPLING), session=session)

    def with_trace() -> None:
        for seed, prompt in enumerate(pair.prompts):
            traced(plain, prompt, pair.new_tokens, seed)

    seconds = interleaved({"plain": pair.answer(plain), "traced": with_trace}, 3 * repeats, pair.clock)
    cost = 100 * (paired_ratio(seconds["traced"], seconds["plain"]) - 1)
    yield Number(f"spec:k={K} with decode --trace, T=1, time added", pair.name, cost, "%", "<= 2")

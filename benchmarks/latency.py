"""Measure the decoder beside transformers, and beyond its forwards: `python benchmarks/latency.py --output DIR`.

Every ratio is taken in one process with one thread and process CPU time, interleaved, as a median of paired runs. The
models are random ones (synthetic.py) or the embedded pair. `draftsmith eval bench` measures what heads gain, and
gpu_report.py rounds beside what a machine allows.
"""

from __future__ import annotations

import copy
import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from draftsmith.benchmarks.measured import Measured, report
from draftsmith.benchmarks.synthetic import random_head, random_pair
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.eval.clock import Stopwatch, clock_of, interleaved
from draftsmith.launch.cli import main_of
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.decoding.trace import DecodeStep
from draftsmith.modules.decoding.tree import DynamicTree
from draftsmith.modules.drafters.draft_model import DraftModelNet
from draftsmith.modules.drafters.net import ChainDrafter, TreeDrafter
from draftsmith.modules.engine.rows import OneRow
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import load_lm, load_transformers
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import SamplingParams, check_range

K = 5
TREE = DynamicTree(nodes=60, depth=6, topk=10)
PROMPT = 64  # tokens of a random prompt
CLOCK = clock_of("cpu", 1)


@dataclass(frozen=True)
class LatencyConfig:
    """Measures the decoder's own cost against transformers and against its forwards, on a CPU.

    Attributes:
        output: Directory that receives latency.json and latency.md.
        models: embedded, the pair that ships; 88m, a random pair; tiny, which computes next to nothing.
        new_tokens: Tokens of a response.
        repeats: Paired runs of which the median counts.
    """

    output: Path = field(kw_only=True)
    models: Literal["embedded", "88m", "tiny"] = "embedded"
    new_tokens: int = 64
    repeats: int = 5
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_range("new_tokens", self.new_tokens, 4 * K)
        check_range("repeats", self.repeats, 1)


@dataclass(frozen=True)
class Pair:
    """A target and its draft model, in our engine and in transformers, with prompts."""

    target: LlamaLM
    draft: LlamaLM
    theirs: tuple[Any, Any]
    prompts: list[list[int]]
    new_tokens: int

    @classmethod
    def of(cls, config: LatencyConfig) -> Pair:
        from transformers import GenerationConfig

        # Assisted generation warns about the arguments that it passes to itself.
        logging.getLogger("transformers.generation.utils").setLevel(logging.ERROR)
        if config.models == "embedded":
            paths = ("embedded:target", "embedded:draft")
            ours: Any = [load_lm(path, "float32", packed=True) for path in paths]
            theirs = [load_transformers(Checkpoint(path), torch.float32).eval() for path in paths]
            prompts = [row.prompt_ids for row in read_prompts("embedded:prompts", paths[0], "test", None, 4)]
        else:
            weights = random_pair(config.models, torch.float32, "cpu")
            ours = [own.lean(True) for own in weights]
            theirs = [own.transformers() for own in weights]
            torch.manual_seed(0)
            prompts = [torch.randint(ours[0].info.vocab_size, (PROMPT,)).tolist()]
        for model in theirs:
            model.generation_config = GenerationConfig()  # a model's own defaults would apply unasked
        return cls(ours[0], ours[1], (theirs[0], theirs[1]), prompts, config.new_tokens)

    def runner(self, method: Literal["ar", "spec", "tree"], forwards: Stopwatch | None = None) -> EngineRunner:
        """Return a decoder. forwards: times every forward of its models."""

        def timed(lm: LlamaLM) -> LlamaLM:
            return lm if forwards is None else timed_copy(lm, forwards)

        drafter: ChainDrafter | TreeDrafter | None = None
        target = timed(self.target)
        capacity = max(map(len, self.prompts)) + self.new_tokens + 2 * TREE.nodes
        if method == "spec":
            drafter = ChainDrafter(DraftModelNet(timed(self.draft)), FixedLengthStop(K), capacity)
        elif method == "tree":
            net = random_head("eagle", self.target).net(target)
            drafter = TreeDrafter(net, TREE, capacity)
            if forwards is not None:
                assert isinstance(net.cache, OneRow)
                net.cache.stack = timed_stack(net.cache.stack, forwards)
        return EngineRunner(target, drafter, SamplingParams(), ())

    def generate(self, assisted: bool) -> list[list[int]]:
        """Return the answers of transformers' `generate`."""
        from transformers import GenerationConfig

        target, draft = self.theirs
        # `generate` reads these from the assistant.
        draft.generation_config = GenerationConfig(
            num_assistant_tokens=K, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        config = GenerationConfig(max_new_tokens=self.new_tokens, do_sample=False, pad_token_id=0)
        answers = []
        for prompt in self.prompts:
            ids = torch.tensor([prompt])
            options = {"attention_mask": torch.ones_like(ids), "generation_config": config}
            output = target.generate(ids, **options, assistant_model=draft if assisted else None)
            answers.append(output[0, len(prompt) :].tolist())
        return answers

    def decode(self, method: Literal["ar", "spec"]) -> list[list[int]]:
        runner = self.runner(method)
        return [runner(prompt, self.new_tokens, 0).tokens for prompt in self.prompts]


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


def beside_transformers(pair: Pair, repeats: int) -> Iterator[Measured]:
    """Compare seconds with those of transformers: same weights, prompts and number of tokens."""
    calls: dict[str, Callable[[], Any]] = {
        "hf": partial(pair.generate, False),
        "hf-assisted": partial(pair.generate, True),
        "ar": partial(pair.decode, "ar"),
        "spec": partial(pair.decode, "spec"),
    }
    with torch.inference_mode():
        seconds = interleaved(calls, repeats, CLOCK)
    assisted = f"transformers' assisted generation, K={K}"
    for what, slower, faster in (
        ("ar / transformers' generate", "hf", "ar"),
        (f"spec:k={K} / {assisted}", "hf-assisted", "spec"),
        (f"{assisted} / its generate", "hf", "hf-assisted"),
    ):
        ratios = [a / b for a, b in zip(seconds[slower], seconds[faster], strict=True)]
        yield Measured(what, statistics.median(ratios), "x")


def beyond_forwards(pair: Pair, repeats: int) -> Iterator[Measured]:
    """Measure how much of a greedy round's time is none of its forwards."""
    methods: Sequence[Literal["spec", "tree"]] = ("spec", "tree")
    for method in methods:
        shares = [share_beyond(pair, method) for _ in range(repeats)]
        what = {"spec": f"spec:k={K}", "tree": f"eagle-tree, {TREE.nodes} nodes"}[method]
        yield Measured(f"{what}: of a round, beyond its forwards", 100 * statistics.median(shares), "%")


def share_beyond(pair: Pair, method: Literal["spec", "tree"]) -> float:
    """Return the share over whole rounds of one response, without the first, which reads the prompt."""
    forwards, marks = Stopwatch(CLOCK), list[tuple[float, float]]()

    def mark(done: Round) -> None:
        marks.append((CLOCK(), forwards.seconds))

    runner = replace(pair.runner(method, forwards), on_round=mark)
    steps: Sequence[DecodeStep] = runner(pair.prompts[0], pair.new_tokens, 0).trace.steps
    whole = max(step.num_drafted for step in steps)
    rounds = [
        (end[0] - start[0], end[1] - start[1])
        for start, end, step in zip(marks, marks[1:], steps[1:], strict=False)
        if step.num_drafted == whole
    ]
    taken, in_forwards = (sum(values) for values in zip(*rounds, strict=True))
    return (taken - in_forwards) / taken


@sole_writer()
def run(config: LatencyConfig) -> Path:
    """Measure, print every row as it comes, write latency.json and latency.md; return the directory."""
    torch.set_num_threads(1)
    pair = Pair.of(config)
    parts = (part(pair, config.repeats) for part in (beside_transformers, beyond_forwards))
    return report(config, "latency", (row for part in parts for row in part))


if __name__ == "__main__":
    sys.exit(main_of(LatencyConfig, run))

"""Target and draft as the latency benchmark needs them: in both layouts of their weights, and in transformers."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from draftsmith.benchmarks.synthetic import random_eagle_head, random_pair
from draftsmith.data.models.loading import DTYPES, load_lm
from draftsmith.eval.bench.hf_baseline import load_hf_model
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.bench.runner import EngineRunner, Runner
from draftsmith.eval.clock import Clock, Stopwatch
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.drafters.feature_heads import FeatureTreeDrafter
from draftsmith.modules.drafters.growth import DynamicTree
from draftsmith.modules.engine.low_precision import Precision
from draftsmith.modules.engine.rows import OneRow
from draftsmith.modules.targets.base import Session
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import SamplingParams

K = 5
TREE = DynamicTree(nodes=60, depth=6, topk=10)
GREEDY, SAMPLING = SamplingParams(0.0), SamplingParams(1.0)
RANDOM_PROMPT = 64  # tokens


def paired_ratio(slower: list[float], faster: list[float]) -> float:
    """Median over repeats of slower / faster."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def timed_copy(lm: LlamaLM, forwards: Stopwatch) -> LlamaLM:
    """The model, with the time of all that multiplies with its weights taken, and of nothing of the decoder's work."""
    found = copy.copy(lm)
    for name in ("embed", "norm", "lm_head"):
        setattr(found, name, forwards.timed(getattr(lm, name)))
    found.stack = timed_stack(lm.stack, forwards)
    return found


def timed_stack(stack: Any, forwards: Stopwatch) -> Any:
    """A model's layers, timed."""
    found = copy.copy(stack)
    found.run = forwards.timed(stack.run)
    return found


@dataclass(frozen=True)
class Pair:
    """A target and its draft in both layouts and in transformers, with prompts to decode.

    load(packed, precision) gives target and draft of our engine, load_hf() those of transformers. weight_bytes: what a
    forward of the target reads, where that is more than caches hold.
    """

    name: str
    load: Callable[..., tuple[LlamaLM, LlamaLM]]
    load_hf: Callable[[], tuple[Any, Any]]
    prompts: list[list[int]]
    new_tokens: int
    clock: Clock
    weight_bytes: int | None = None

    @cached_property
    def packed(self) -> tuple[LlamaLM, LlamaLM]:
        return self.load(True)

    @property
    def capacity(self) -> int:
        return max(map(len, self.prompts)) + self.new_tokens + 2 * TREE.nodes

    @cached_property
    def session(self) -> Session | None:
        """A session; on a GPU one serves all runs, for the graphs that it holds."""
        target = self.packed[0]
        return target.session(1, self.capacity) if target.device.type == "cuda" else None

    def chain(self, models: tuple[LlamaLM, LlamaLM], params: SamplingParams) -> EngineRunner:
        drafter = DraftModelDrafter(models[1], [FixedLength(K)], self.capacity)
        return EngineRunner(models[0], drafter, params, (), session=self.session)

    def timed_chain(self, params: SamplingParams, forwards: Stopwatch) -> EngineRunner:
        """The same as `chain`, with all forwards of both models timed."""
        target, draft = (timed_copy(lm, forwards) for lm in self.packed)
        return self.chain((target, draft), params)

    @cached_property
    def head(self) -> Any:
        return random_eagle_head(self.packed[0])

    def tree_drafter(self, forwards: Stopwatch | None = None) -> FeatureTreeDrafter:
        target = self.packed[0] if forwards is None else timed_copy(self.packed[0], forwards)
        drafter = FeatureTreeDrafter(self.head, target, TREE, self.capacity)
        if forwards is not None:
            assert isinstance(drafter.cache, OneRow)
            drafter.cache.stack = timed_stack(drafter.cache.stack, forwards)
        return drafter

    def tree(self, params: SamplingParams, forwards: Stopwatch | None = None) -> EngineRunner:
        """forwards: times all forwards of the target and the head."""
        target = self.packed[0] if forwards is None else timed_copy(self.packed[0], forwards)
        return EngineRunner(target, self.tree_drafter(forwards), params, (), session=self.session)

    def answer(self, runner: Runner) -> Callable[[], None]:
        def call() -> None:
            for seed, prompt in enumerate(self.prompts):
                runner([prompt], self.new_tokens, [seed])

        return call


def random_models(shape: str, dtype: str, device: str, new_tokens: int, clock: Clock) -> Pair:
    """A random pair of this shape; weights are made once and shared by our engine and transformers."""
    target, draft = random_pair(shape, DTYPES[dtype], device)
    torch.manual_seed(0)
    prompt = torch.randint(target.config.vocab_size, (RANDOM_PROMPT,)).tolist()

    def load(packed: bool, precision: Precision = "dtype") -> tuple[LlamaLM, LlamaLM]:
        return target.lean(packed, precision), draft.lean(packed, precision)

    def load_hf() -> tuple[Any, Any]:
        return target.transformers(), draft.transformers()

    return Pair(f"{shape} {dtype}", load, load_hf, [prompt], new_tokens, clock, target.forward_bytes)


def embedded_models(new_tokens: int, clock: Clock) -> Pair:
    """The shipped pair on some of its test prompts."""
    paths = "embedded:target", "embedded:draft"
    rows = read_prompts("embedded:prompts", paths[0], "test", None, 4)

    def load(packed: bool, precision: Precision = "dtype") -> tuple[Any, Any]:
        target, draft = (load_lm(path, packed=packed, precision=precision) for path in paths)
        return target, draft

    def load_hf() -> tuple[Any, Any]:
        return load_hf_model(paths[0], "float32", "cpu"), load_hf_model(paths[1], "float32", "cpu")

    return Pair("embedded float32", load, load_hf, [row.prompt_ids for row in rows], new_tokens, clock)

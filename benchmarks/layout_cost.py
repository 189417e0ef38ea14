"""What a round takes by how small weights lie in memory, and by how many tokens a head drafts. A CPU's time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from draftsmith.benchmarks.decoder_cost import Number
from draftsmith.benchmarks.pairs import GREEDY, TREE, K, Pair
from draftsmith.benchmarks.synthetic import random_eagle_head
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.eval.cost.clock import interleaved
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.drafters.eagle3.head import Eagle3Head, Eagle3Settings
from draftsmith.modules.drafters.feature_heads import FeatureTreeDrafter
from draftsmith.modules.drafters.growth import DynamicTree
from draftsmith.modules.engine import quantized
from draftsmith.modules.engine.packed import MIN_WEIGHTS, LeanLinear
from draftsmith.modules.targets.llama import LlamaLM

SMALL_TREE = DynamicTree(nodes=12, depth=4, topk=4)
# One in four tokens: EAGLE-3's own share of Llama 3's vocabulary.
DRAFTED_SHARE = 4


class RowMajor(LeanLinear):
    """Small weights as they were read, [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = False):
        super().__init__(weight, bias, pack and weight.numel() >= MIN_WEIGHTS)


def small_weights(pair: Pair, repeats: int) -> Iterator[Number]:
    """The same weights [out, in] (by rows) and [in, out] in memory, end to end. By the round, as rounding may decide a
    near tie."""
    with mock.patch.object(quantized, "LeanLinear", RowMajor):
        before = _methods(pair, pair.load(True))
    after = _methods(pair, pair.load(True))
    # Each beside its other: what the machine does changes from one second to the next.
    runners = {f"{name} {when}": own[name] for name in after for when, own in (("0", before), ("1", after))}
    taken = round_seconds(pair, runners, repeats)
    for name in after:
        ratio = _ratio(taken[f"{name} 0"], taken[f"{name} 1"])
        aim = "" if name == "ar" else ">= 1.12"
        yield Number(f"{name}: a round with small weights by rows / by columns", pair.name, ratio, "x", aim)


def _methods(pair: Pair, models: tuple[LlamaLM, LlamaLM]) -> dict[str, EngineRunner]:
    target, draft = models
    head = random_eagle_head(target)
    drafters: dict[str, Any] = {
        "ar": None,
        f"spec:k={K}": DraftModelDrafter(draft, [FixedLength(K)], pair.capacity),
        f"eagle:k={K}": head.drafter(target, [FixedLength(K)], pair.capacity),
        "eagle2, 12 nodes": FeatureTreeDrafter(head, target, SMALL_TREE, pair.capacity),
        "eagle2, 60 nodes": FeatureTreeDrafter(head, target, TREE, pair.capacity),
    }
    return {name: EngineRunner(target, drafter, GREEDY, ()) for name, drafter in drafters.items()}


def draft_vocabularies(pair: Pair, repeats: int) -> Iterator[Number]:
    """EAGLE-3 over all of the target's tokens, and over some of them. Its weights are random: a round's time is that of
    a trained one, what is accepted is not."""
    target = pair.packed[0]
    size = target.config.vocab_size // DRAFTED_SHARE
    runners = {}
    for own in (target.config.vocab_size, size):
        head = random_eagle3_head(target, own)
        runners[f"chain {own}"] = EngineRunner(
            target, head.drafter(target, [FixedLength(K)], pair.capacity), GREEDY, ()
        )
        tree = FeatureTreeDrafter(head, target, TREE, pair.capacity)
        runners[f"tree {own}"] = EngineRunner(target, tree, GREEDY, ())
    taken = round_seconds(pair, runners, repeats)
    for name, label in (("chain", f"eagle3:k={K}"), ("tree", "eagle3, a tree of 60 nodes")):
        ratio = _ratio(taken[f"{name} {target.config.vocab_size}"], taken[f"{name} {size}"])
        what = f"{label}: a round over {target.config.vocab_size:,} tokens / over {size:,}"
        yield Number(what, pair.name, ratio, "x")


def random_eagle3_head(target: LlamaLM, draft_vocab: int) -> Any:
    """An EAGLE-3 head of the target's shape, untrained."""
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Head.shape(Eagle3Settings(draft_vocab=draft_vocab), target.config))
    head.use_draft_vocabulary(torch.randperm(target.config.vocab_size)[:draft_vocab].sort().values)
    return head.to(target.device, target.dtype).eval().requires_grad_(False)


def round_seconds(pair: Pair, runners: Mapping[str, EngineRunner], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of a round, `repeats` times each in turn."""
    with torch.inference_mode():
        seconds = interleaved({name: pair.answer(run) for name, run in runners.items()}, repeats, pair.clock)
    found = {}
    for name, run in runners.items():
        answers = [run([prompt], pair.new_tokens, [seed])[0] for seed, prompt in enumerate(pair.prompts)]
        rounds = sum(answer.trace.num_target_calls for answer in answers)
        found[name] = [taken / rounds for taken in seconds[name]]
    return found


def _ratio(before: list[float], after: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(before, after, strict=True))

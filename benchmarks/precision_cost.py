"""What fewer bits are worth to a round: of what drafts, and of the target. A CPU's time, and nothing about quality."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from draftsmith.benchmarks.decoder_cost import Number
from draftsmith.benchmarks.pairs import GREEDY, K, Pair
from draftsmith.benchmarks.synthetic import random_eagle_head
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.eval.cost.clock import interleaved
from draftsmith.modules.decoding.stop import FixedLength
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.engine.quantized import Precision, can_int8
from draftsmith.modules.targets.llama import LlamaLM

BITS: tuple[Precision, ...] = ("dtype", "bf16", "int8")


def precisions(pair: Pair, repeats: int) -> Iterator[Number]:
    """A round's time by what its parts are held in. By the round, because random weights say nothing of what would be
    accepted."""
    bits = [own for own in BITS if own != "int8" or can_int8()]
    targets = {own: pair.load(True, own)[0] for own in bits if own != "bf16"}
    drafts = {own: pair.load(True, own)[1] for own in bits}

    def spec(target: LlamaLM, own: Precision) -> EngineRunner:
        drafter = DraftModelDrafter(drafts[own], [FixedLength(K)], pair.capacity)
        return EngineRunner(target, drafter, GREEDY, ())

    def eagle(target: LlamaLM, own: Precision) -> EngineRunner:
        head = random_eagle_head(target)
        head.draft_in(own, target)
        return EngineRunner(target, head.drafter(target, [FixedLength(K)], pair.capacity), GREEDY, ())

    plain = targets["dtype"]
    spec_name, eagle_name = f"spec:k={K}", f"eagle:k={K}"
    runners = {f"ar {own}": EngineRunner(target, None, GREEDY, ()) for own, target in targets.items()}
    for own in bits:
        runners |= {f"{spec_name} {own}": spec(plain, own), f"{eagle_name} {own}": eagle(plain, own)}
    aims: list[tuple[str, str, str]] = []
    aims += [(spec_name, own, ">= 1.2") for own in bits[1:]] + [(eagle_name, own, ">= 1.2") for own in bits[1:]]
    if "int8" in targets:
        runners[f"{spec_name} int8, the target too"] = spec(targets["int8"], "int8")
        aims += [("ar", "int8", ""), (spec_name, "int8, the target too", "")]
    with torch.inference_mode():
        seconds = interleaved({name: pair.answer(run) for name, run in runners.items()}, repeats, pair.clock)
    rounds = {}
    for name, run in runners.items():
        answers = [run([prompt], pair.new_tokens, [seed])[0] for seed, prompt in enumerate(pair.prompts)]
        rounds[name] = sum(answer.trace.num_target_calls for answer in answers)
    for method, held, aim in aims:
        before, after = f"{method} dtype", f"{method} {held}"
        ratios = [a / b for a, b in zip(seconds[before], seconds[after], strict=True)]
        faster = statistics.median(ratios) * rounds[after] / rounds[before]
        part = "target" if method == "ar" else "draft"
        yield Number(f"{method}: a round with the {part} as loaded / in {held}", pair.name, faster, "x", aim)

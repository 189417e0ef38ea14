"""`draftsmith eval lossless`: a certificate that methods leave a model's output as it is, for your models and machine.

Each method runs in both of the decoder's loops, the single one and, where it has a form for it, the batched one that
`--batch-size` and CUDA use. Greedy: `greedy.py`. Sampling: every emitted token is held against the target's own
distribution after what came before it (`evidence.py`), as many as the power asked for takes (`power.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.data.heads.draft_settings import DraftSettings
from draftsmith.data.models.device import check_device
from draftsmith.data.models.loading import load_lm
from draftsmith.data.progress import say
from draftsmith.data.settings import Sampling
from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.manifest import package_versions, resolved
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import check_methods, load_models
from draftsmith.eval.bench.prompts import BenchPrompt, longest_sequence, read_prompts
from draftsmith.eval.bench.results import hardware
from draftsmith.eval.lossless.answers import BatchedLoop, SingleLoop
from draftsmith.eval.lossless.greedy import greedy_answers, greedy_test
from draftsmith.eval.lossless.sampling import Asked, SamplingTest
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.modules.drafters.methods import Method, Models, Named, parse_methods
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, at_least, between

RESULTS = "lossless.json"
LOOPS = ("single", "batched")


@dataclass(frozen=True)
class LosslessConfig(DraftSettings, PromptChoice, AnswerLength, Sampling, Running):
    """Certifies that decoding methods do not change what the target says. Exit code 1 when one does.

    Attributes:
        target: model directory, hub id or embedded:target.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts.
        output: directory that receives lossless.json.
        methods: name:setting=value, separated by commas, as in `draftsmith eval bench`.
        mid: model between draft and target.
        acceptance: acceptance head directory.
        limit: prompts of the greedy test.
        max_new_tokens: longest answer of the greedy test.
        sampled_prompts: prompts of the sampling test, the first of them; 0 leaves it out.
        sampled_tokens: longest answer of the sampling test.
        bias: size of a bias that is to be found: mean over emitted tokens of the total variation between the
            distribution that a token was drawn from and the target's.
        power: probability to find it; with bias and alpha it says how many answers are sampled.
        alpha: chance that all sampling tests together fail lossless methods, at most.
        temperature: of the sampling test.
        batch_size: prompts that are answered together, in rows.
        max_gap: largest logit gap to the best token of a greedy token, where the dtype is not float32.
        dtype: float32, bfloat16 or float16. engine: lean (Llama family), hf (any transformers model, alone
            only), or auto.
    """

    target: str
    prompts: str
    output: Path
    methods: str = "spec:k=5"
    mid: str | None = None
    acceptance: str | None = None
    limit: int = 20
    max_new_tokens: int = field(default=64, kw_only=True)
    sampled_prompts: int = 4
    sampled_tokens: int = 32
    bias: float = 0.015
    power: float = 0.9
    alpha: float = 1e-3
    temperature: float = field(default=1.0, kw_only=True)
    batch_size: int = 8
    max_gap: float = 0.5
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("limit", "max_new_tokens", "batch_size", "num_threads"):
            at_least(name, getattr(self, name), 1)
        at_least("sampled_prompts", self.sampled_prompts, 0)
        at_least("sampled_tokens", self.sampled_tokens, 2)  # the first one is the prefill's
        for name in ("alpha", "bias", "power"):
            between(name, getattr(self, name), 0, 1)
        if not self.max_gap >= 0:
            raise InputError("max_gap", self.max_gap, "0 or more", "Correct it.")
        if self.sampling.greedy:
            raise InputError("temperature", self.temperature, "more than 0", "The greedy test is always made.")


@sole_writer()
def run(config: LosslessConfig) -> int:
    """Test every method, print and write the verdicts; 0 when all passed, else 1."""
    named = parse_methods(config.methods)
    check_methods(named, config.paths)
    check_device(config.device)
    torch.set_num_threads(config.num_threads)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    target = load_lm(config.target, **config.loading)
    longest = longest_sequence(prompts, max(config.max_new_tokens, config.sampled_tokens), target.info.max_position)
    models = load_models(named, config.paths, longest, config.sampling, target, **config.loading)
    models = dataclasses.replace(models, ends=ends_of(config, target))
    reference = None if config.dtype == "float32" else load_lm(config.target, **{**config.loading, "dtype": "float32"})
    found = certify(config, named, models, prompts, reference)
    write(config, named, found, target)
    return 0 if all(row["passed"] for row in found) else 1


def certify(
    config: LosslessConfig,
    named: Sequence[Named],
    models: Models,
    prompts: Sequence[BenchPrompt],
    reference: CausalLM | None,
) -> list[dict[str, Any]]:
    """A row for each method, with one for each of its loops. reference: the target in float32, where it is not."""
    target = models.target
    ends = ends_of(config, target)
    plain = SingleLoop(target, None, ends)
    expected = greedy_answers(plain, prompts, config.max_new_tokens, 1, config.seed)
    batched = {item.label: in_batches(item.method, models) for item in named}
    asked = asked_tests(config, target, sum(1 + both for both in batched.values()), config.seed)
    found = []
    for item in named:
        loops = []
        for name in LOOPS[: 1 + batched[item.label]]:
            together = config.batch_size if name == "batched" else 1
            loop = loop_of(item.method, name, models, config)
            answers = greedy_answers(loop, prompts, config.max_new_tokens, together, config.seed)
            limits = (config.max_new_tokens, reference, target.info, config.max_gap)
            row: dict[str, Any] = {"loop": name, "greedy": greedy_test(answers, expected, prompts, ends, *limits)}
            row["sampling"] = None
            if config.sampled_prompts:
                some = prompts[: config.sampled_prompts]
                fresh = loop_of(item.method, name, models, config)  # has learned nothing yet
                test = SamplingTest(item.label, fresh, target, some, asked, say)
                row["sampling"] = test.run()
            row["passed"] = all(test["passed"] for test in (row["greedy"], row["sampling"]) if test is not None)
            loops.append(row)
        found.append({"method": item.label, "loops": loops, "passed": all(row["passed"] for row in loops)})
    return found


def ends_of(config: LosslessConfig, target: CausalLM) -> tuple[int, ...]:
    return () if config.ignore_eos else tuple(target.info.eos_ids)


def asked_tests(config: LosslessConfig, target: CausalLM, tests: int, seed: int) -> Asked:
    """What is asked of each of so many tests, which share alpha."""
    return Asked(
        config.sampling,
        config.sampled_tokens,
        ends_of(config, target),
        config.bias,
        config.power,
        config.alpha / max(1, tests),
        config.batch_size,
        seed,
        config.max_gap,
    )


def loop_of(method: Method, name: str, models: Models, config: LosslessConfig) -> SingleLoop:
    """The method in one of the loops, with a drafter of its own."""
    ends, rows = ends_of(config, models.target), config.batch_size if name == "batched" else 1
    drafter = method.build(models, rows)
    if name == "single":
        return SingleLoop(models.target, drafter, ends)
    capture = () if drafter is None else drafter.capture
    return BatchedLoop(models.target, drafter, ends, models.target.session(rows, models.capacity, capture))


def in_batches(method: Method, models: Models) -> bool:
    """Whether it can be run for several prompts together: its models read rows side by side."""
    lms = (models.target, models.draft, models.mid)
    return method.batchable and all(isinstance(lm, LlamaLM) for lm in lms if lm is not None)


def write(config: LosslessConfig, named: Sequence[Named], found: Sequence[dict[str, Any]], target: CausalLM) -> None:
    """lossless.json, and tables on the screen."""
    meta = {
        "settings": resolved(config),
        "methods": {item.label: dataclasses.asdict(item.method) for item in named},
        "target": target.info.identity,
        "versions": package_versions(),
        "hardware": hardware(config.device),
    }
    make_directory(config.output)
    write_json(config.output / RESULTS, {"meta": meta, "methods": found})
    console = Console(highlight=False)
    console.print(verdicts(found))
    if config.sampled_prompts:
        console.print(known_defects(found))
    console.print(f"[dim]Written to {config.output / RESULTS}[/dim]")


def verdicts(found: Sequence[dict[str, Any]]) -> Table:
    """A row for each method and loop."""
    table = Table(box=None)
    for name in ("method", "loop", "greedy", "tokens", "p", "finds", "verdict"):
        table.add_column(name)
    for method in found:
        for row in method["loops"]:
            verdict = "[green]lossless[/green]" if row["passed"] else "[red]NOT lossless[/red]"
            table.add_row(method["method"], row["loop"], greedy_words(row["greedy"]), *sampled_words(row), verdict)
    return table


def greedy_words(greedy: dict[str, Any]) -> str:
    said = f"{greedy['identical']} of {greedy['prompts']} equal"
    if "largest_logit_gap" in greedy:
        said += f", gap {greedy['largest_logit_gap']:.3f}"
    return said if greedy["ended_as_asked"] else f"{said}, ends wrong"


def sampled_words(row: dict[str, Any]) -> tuple[str, str, str]:
    """Tokens, p-value and power; of a test that failed, what told."""
    test = row["sampling"]
    if test is None:
        return "none", "", ""
    tokens, p_value = f"{test['tokens']:,}", f"{test['p_value']:.2g}"
    if test["wrong_ends"]:
        return tokens, p_value, f"{test['wrong_ends']} answers end wrong"
    if test["impossible"]:
        return tokens, p_value, f"{test['impossible']} impossible tokens"
    if not test["passed"]:
        return tokens, p_value, test["strongest_bet"]
    finds = test["finds"]
    if finds["with_probability"] is None:
        return tokens, p_value, f"none of TV {finds['bias']:g} is possible here"
    return tokens, p_value, f"TV {finds['bias']:g} with {rounded_down(finds['with_probability'])}"


def rounded_down(chance: float) -> str:
    """The number rounded down, so that nothing below 1 reads as certain."""
    return f"{math.floor(100 * chance) / 100:.2f}"


def known_defects(found: Sequence[dict[str, Any]]) -> Table:
    """What each test would have found, had its method this defect: total variation, and probability."""
    table = Table(box=None, title="Had a method this defect here: its TV, and the probability to find it")
    for name in ("method", "loop", "defect", "TV", "found with"):
        table.add_column(name)
    for method in found:
        for row in method["loops"]:
            finds = row["sampling"]["finds"]
            for number, (name, defect) in enumerate(finds["defects"].items() if finds else ()):
                whose = ("", "") if number else (method["method"], row["loop"])
                table.add_row(*whose, name, f"{defect['tv']:.4f}", rounded_down(defect["found_with"]))
    return table

"""`draftsmith eval lossless`: a certificate that methods leave a model's output as it is, for your models and machine.

Each method answers prompts one by one and, where it can, in rows side by side, with other caches and shapes. Greedy:
`answers.py`. Sampling: every emitted token is held against the target's own distribution after what came before it
(`evidence.py`), as many as the power asked for takes (`power.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from draftsmith.data.console import note, show
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.manifest import package_versions, resolved
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.tables import Table, of_cells
from draftsmith.eval.bench.load import check_methods, load_run
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.bench.results import hardware
from draftsmith.eval.lossless.answers import PlacedRunner, greedy_answers, greedy_test
from draftsmith.eval.lossless.sampling import SamplingTest
from draftsmith.eval.lossless.settings import LosslessConfig
from draftsmith.modules.drafters.methods import Method, Models, Named, parse_methods
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import LlamaLM

RESULTS = "lossless.json"


@sole_writer()
def run(config: LosslessConfig) -> int:
    """Test every method, print and write the verdicts; 0 when all passed, else 1."""
    named = parse_methods(config.methods)
    check_methods(named, config.paths)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    longest_answer = max(config.max_new_tokens, config.sampled_tokens)
    models = load_run(config, named, prompts, longest_answer, config.sampling)
    reference = None if config.dtype == "float32" else load_lm(config.target, **{**config.loading, "dtype": "float32"})
    found = certify(config, named, models, prompts, reference)
    write(config, named, found, models.target)
    return 0 if all(row["passed"] for row in found) else 1


def certify(
    config: LosslessConfig,
    named: Sequence[Named],
    models: Models,
    prompts: Sequence[BenchPrompt],
    reference: CausalLM | None,
) -> list[dict[str, Any]]:
    """A row for each method, with one for each way to run it. reference: the target in float32, where it is not."""
    target = models.target
    expected = greedy_answers(PlacedRunner(target, None, models.ends), prompts, config.max_new_tokens, config.seed)
    rows = {item.label: rows_tested(item.method, models, config.batch_size) for item in named}
    level = config.alpha / sum(map(len, rows.values()))  # the tests share it
    limits = (config.max_new_tokens, reference, target.info, config.max_gap)
    found = []
    for item in named:
        if not item.method.lossless:
            note(f"{item.label}: its rule of acceptance changes the output; the tests show whether they find it")
        loops = []
        for count in rows[item.label]:
            runner = PlacedRunner.of(item.method, models, count)
            answers = greedy_answers(runner, prompts, config.max_new_tokens, config.seed)
            row: dict[str, Any] = {"loop": runner.loop, "sampling": None}
            row["greedy"] = greedy_test(answers, expected, prompts, models.ends, *limits)
            if config.sampled_prompts:
                fresh = PlacedRunner.of(item.method, models, count)  # has learned nothing yet
                some = prompts[: config.sampled_prompts]
                row["sampling"] = SamplingTest(item.label, fresh, some, config, level, note).run()
            tests = [test["passed"] for test in (row["greedy"], row["sampling"]) if test is not None]
            row["passed"] = all(tests) and item.method.lossless
            loops.append(row)
        passed = all(row["passed"] for row in loops)
        found.append({"method": item.label, "lossless": item.method.lossless, "loops": loops, "passed": passed})
    return found


def rows_tested(method: Method, models: Models, batch_size: int) -> list[int]:
    """How many prompts are answered together: one, and several where its models read rows side by side."""
    lms = (models.target, models.draft, models.mid)
    side_by_side = method.batchable and all(isinstance(lm, LlamaLM) for lm in lms if lm is not None)
    return [1, batch_size] if side_by_side and batch_size > 1 else [1]


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
    show(verdicts(found))
    if config.sampled_prompts:
        show(known_defects(found))
    note(f"Written to {config.output / RESULTS}")


def verdicts(found: Sequence[dict[str, Any]]) -> Table:
    """A row for each method and loop."""
    rows: list[tuple[Any, ...]] = []
    for method in found:
        for row in method["loops"]:
            verdict = Text("lossless", "green") if row["passed"] else Text("NOT lossless", "red")
            if not method["lossless"]:
                verdict.append(", by its rule")
            rows.append((method["method"], row["loop"], greedy_words(row["greedy"]), *sampled_words(row), verdict))
    return of_cells("verdicts", ("method", "loop", "greedy", "tokens", "p", "finds", "verdict"), rows)


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
    rows = []
    for method in found:
        for row in method["loops"]:
            finds = row["sampling"]["finds"]
            for name, defect in finds["defects"].items() if finds else ():
                chance = rounded_down(defect["found_with"])
                rows.append((name, method["method"], row["loop"], f"{defect['tv']:.4f}", chance))
    right = ("TV", "found with")
    table = of_cells("defects", ("defect", "method", "loop", *right), rows, right)
    return dataclasses.replace(table, title="Had a method this defect here: its TV, and the probability to find it")

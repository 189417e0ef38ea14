"""`draftsmith eval lossless`: certify on your models and machine that methods keep the target's output.

Each method answers prompts one at a time and, if it can, in rows side by side, which use other caches and shapes. The
greedy test compares answers with autoregressive ones (`answers.py`). The sampling test compares every emitted token
with the target's own distribution after what came before it (`sampling.py`, `evidence.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from draftsmith.data.console import Table, log_note, print_table, table_from_cells
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.manifest import package_versions, resolved
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.bench.results import hardware
from draftsmith.eval.bench.runner import check_methods, load_run
from draftsmith.eval.lossless.answers import PlacedRunner, greedy_answers, greedy_test
from draftsmith.eval.lossless.sampling import LosslessConfig, SamplingTest
from draftsmith.modules.drafters.methods import Method, Models, Named, parse_methods
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import LlamaLM

RESULTS = "lossless.json"


@sole_writer()
def run(config: LosslessConfig) -> int:
    """Test every method, print and write the verdicts, and return 0 if all passed, else 1."""
    methods = parse_methods(config.methods)
    check_methods(methods, config.paths)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    longest_answer = max(config.max_new_tokens, config.sampled_tokens)
    models = load_run(config, methods, prompts, longest_answer, config.sampling)
    reference = None if config.dtype == "float32" else load_lm(config.target, **{**config.loading, "dtype": "float32"})
    verdicts = certify(config, methods, models, prompts, reference)

    meta = {
        "settings": resolved(config),
        "methods": {item.label: dataclasses.asdict(item.method) for item in methods},
        "target": models.target.info.identity,
        "versions": package_versions(),
        "hardware": hardware(config.device),
    }
    make_directory(config.output)
    write_json(config.output / RESULTS, {"meta": meta, "methods": verdicts})
    print_table(verdict_table(verdicts))
    log_note(f"Written to {config.output / RESULTS}")
    return 0 if all(verdict["passed"] for verdict in verdicts) else 1


def certify(
    config: LosslessConfig,
    methods: Sequence[Named],
    models: Models,
    prompts: Sequence[BenchPrompt],
    reference: CausalLM | None,
) -> list[dict[str, Any]]:
    """Return a verdict for each method, with a row for each loop it was run in.

    Args:
        reference: the target in float32, if `models` has it in another dtype.
    """
    target = models.target
    expected = greedy_answers(PlacedRunner(target, None, models.ends), prompts, config.max_new_tokens, config.seed)
    num_rows = {item.label: rows_to_test(item.method, models, config.batch_size) for item in methods}
    level = config.alpha / sum(map(len, num_rows.values()))  # Bonferroni: all sampling tests share alpha
    verdicts = []
    for item in methods:
        if not item.method.lossless:
            log_note(f"{item.label}: its rule of acceptance changes the output; the tests show whether they find it")
        loops = []
        for count in num_rows[item.label]:
            runner = PlacedRunner.of(item.method, models, count)
            answers = greedy_answers(runner, prompts, config.max_new_tokens, config.seed)
            greedy = greedy_test(
                answers, expected, prompts, models.ends, config.max_new_tokens, reference, target.info, config.max_gap
            )
            sampling = None
            if config.sampled_prompts:
                # Methods that learn online start anew, so that the test does not depend on the greedy prompts.
                fresh = PlacedRunner.of(item.method, models, count)
                sampled = prompts[: config.sampled_prompts]
                sampling = SamplingTest(item.label, fresh, sampled, config, level, log_note).run()
            passed = greedy["passed"] and (sampling is None or sampling["passed"]) and item.method.lossless
            loops.append({"loop": runner.loop, "greedy": greedy, "sampling": sampling, "passed": passed})
        passed = all(row["passed"] for row in loops)
        verdicts.append({"method": item.label, "lossless": item.method.lossless, "loops": loops, "passed": passed})
    return verdicts


def rows_to_test(method: Method, models: Models, batch_size: int) -> list[int]:
    """Return the numbers of prompts to answer together: 1, and several if the models read rows side by side."""
    lms = (models.target, models.draft, models.mid)
    side_by_side = method.batchable and all(isinstance(lm, LlamaLM) for lm in lms if lm is not None)
    return [1, batch_size] if side_by_side and batch_size > 1 else [1]


def verdict_table(verdicts: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row for each method and loop."""
    rows: list[tuple[Any, ...]] = []
    for verdict in verdicts:
        for row in verdict["loops"]:
            greedy, test = row["greedy"], row["sampling"]
            greedy_cell = f"{greedy['identical']} of {greedy['prompts']} equal"
            if "largest_logit_gap" in greedy:
                greedy_cell += f", gap {greedy['largest_logit_gap']:.3f}"
            if not greedy["ended_as_asked"]:
                greedy_cell += ", ends wrong"

            cells = ("none", "", "")
            if test is not None:
                if test["wrong_ends"]:
                    finds = f"{test['wrong_ends']} answers end wrong"
                elif test["impossible"]:
                    finds = f"{test['impossible']} impossible tokens"
                elif not test["passed"]:
                    finds = test["strongest_bet"]
                elif test["found_with"] is None:
                    finds = f"none of TV {test['bias']:g} is possible here"
                else:
                    # Rounded down, so that no probability below 1 is shown as 1.
                    finds = f"TV {test['bias']:g} with {math.floor(100 * test['found_with']) / 100:.2f}"
                cells = (f"{test['tokens']:,}", f"{test['p_value']:.2g}", finds)

            conclusion = Text("lossless", "green") if row["passed"] else Text("NOT lossless", "red")
            if not verdict["lossless"]:
                conclusion.append(", by its rule")
            rows.append((verdict["method"], row["loop"], greedy_cell, *cells, conclusion))
    return table_from_cells("verdicts", ("method", "loop", "greedy", "tokens", "p", "finds", "verdict"), rows)

"""`draftsmith eval lossless`: certify on your models and machine that methods keep the target's output.

Each method answers prompts one at a time and, if it can, in rows side by side, which use other caches and shapes. The
greedy test compares answers with autoregressive ones. The sampling test compares every emitted token with the target's
own distribution after what came before it (`sampling.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.text import Text

from draftsmith.data.console import Table, log_note, print_table, table_from_cells
from draftsmith.data.settings import DraftSettings, Sampling, check_not_negative, check_positive
from draftsmith.data.store.manifest import resolved
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.bench.runner import load_run
from draftsmith.eval.lossless.sampling import MAX_GAP, Evidence, RecordingRunner, decided_tokens, ends_as_asked
from draftsmith.eval.meta import hardware
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.modules.decoding.loop import room_for
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.methods import LabeledMethod, parse_methods
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.pretrained.provenance import package_versions
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams, check_range

RESULTS = "lossless.json"
SAMPLED_PROMPTS = 4  # fewer than a batch, so that rows which share their random numbers repeat an answer


@dataclass(frozen=True)
class LosslessConfig(DraftSettings, PromptChoice, AnswerLength, Sampling, Running):
    """Certify that decoding methods keep the target's output. The exit code is 1 if one does not.

    Attributes:
        target: model directory, hub id or embedded:target.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artifact, a data set, or embedded:prompts.
        output: directory that receives lossless.json.
        methods: name:setting=value, separated by commas, as in `draftsmith eval bench`.
        mid: model between draft and target.
        acceptance: acceptance head directory.
        limit: number of prompts in the greedy test; the sampling test repeats the first of them.
        max_new_tokens: longest answer.
        sampled_tokens: number of tokens in the sampling test; 0 skips it.
        alpha: highest probability that the sampling tests, all together, fail lossless methods.
        temperature: temperature of the sampling test.
        batch_size: prompts that are answered together, in rows.
        dtype: float32, bfloat16 or float16. engine: lean (Llama family), hf (any transformers model, one prompt
            at a time), or auto.
    """

    target: str
    prompts: str
    output: Path
    methods: str = "spec:k=5"
    mid: str | None = None
    acceptance: str | None = None
    limit: int = 20
    max_new_tokens: int = field(default=64, kw_only=True)
    sampled_tokens: int = 8192
    alpha: float = 1e-3
    temperature: float = field(default=1.0, kw_only=True)
    batch_size: int = 8
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "limit", "batch_size", "num_threads")
        check_not_negative(self, "sampled_tokens")
        check_range("max_new_tokens", self.max_new_tokens, 2)  # the first one is the prefill's
        check_range("alpha", self.alpha, 0.0, 1.0, "()")
        if self.sampling.greedy:
            raise InputError("temperature", self.temperature, "more than 0", "The greedy test is always made.")


@sole_writer()
def run(config: LosslessConfig) -> int:
    """Test every method, print and write the verdicts, and return 0 if all passed, else 1."""
    methods = parse_methods(config.methods)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    models = load_run(config, methods, prompts, config.max_new_tokens, config.sampling)
    reference = None if config.dtype == "float32" else load_lm(config.target, **{**config.loading, "dtype": "float32"})
    verdicts = certify(config, methods, models, prompts, reference)

    meta = {
        "settings": resolved(config),
        "methods": {item.label: dataclasses.asdict(item.method) for item in methods},
        "target": models.target.info.identity,
        "versions": package_versions(),
        "hardware": hardware(config.chosen_device),
    }
    make_directory(config.output)
    write_json(config.output / RESULTS, {"meta": meta, "methods": verdicts})
    print_table(verdict_table(verdicts))
    log_note(f"Written to {config.output / RESULTS}")
    return 0 if all(verdict["passed"] for verdict in verdicts) else 1


def certify(
    config: LosslessConfig,
    methods: Sequence[LabeledMethod],
    models: Models,
    prompts: Sequence[BenchPrompt],
    reference: CausalLM | None,
) -> list[dict[str, Any]]:
    """Return a verdict for each method, with a row for each loop it was run in.

    Args:
        reference: the target in float32, if `models` has it in another dtype.
    """
    # One prompt at a time, and several if the models read rows side by side.
    lms = (models.target, models.draft, models.mid)
    side_by_side = config.batch_size > 1 and all(isinstance(lm, LlamaLM) for lm in lms if lm is not None)
    rows = {item.label: [1, config.batch_size] if side_by_side and item.method.batchable else [1] for item in methods}
    level = config.alpha / sum(map(len, rows.values()))  # Bonferroni: all sampling tests share alpha
    expected = greedy_answers(RecordingRunner(None, models), prompts, config)
    verdicts = []
    for item in methods:
        if not item.method.lossless:
            log_note(f"{item.label}: its rule of acceptance changes the output; the tests show whether they find it")
        loops = []
        for count in rows[item.label]:
            answers = greedy_answers(RecordingRunner(item.method, models, count), prompts, config)
            greedy = greedy_test(answers, expected, prompts, models, config, reference)
            sampling = None
            if config.sampled_tokens:
                # Methods that learn online start anew, so that the test does not depend on the greedy prompts.
                runner = RecordingRunner(item.method, models, count)
                sampling = sampling_test(runner, item.label, prompts[:SAMPLED_PROMPTS], config, level)
            passed = greedy["passed"] and (sampling is None or sampling["passed"]) and item.method.lossless
            loop = "single" if count == 1 else "batched"
            loops.append({"loop": loop, "greedy": greedy, "sampling": sampling, "passed": passed})
        passed = all(row["passed"] for row in loops)
        verdicts.append({"method": item.label, "lossless": item.method.lossless, "loops": loops, "passed": passed})
    return verdicts


def greedy_answers(runner: RecordingRunner, prompts: Sequence[BenchPrompt], config: LosslessConfig) -> list[list[int]]:
    """Decode every prompt greedily."""
    ids, seeds = [prompt.prompt_ids for prompt in prompts], [config.seed] * len(prompts)
    return [tokens for tokens, _ in runner(ids, SamplingParams(), config.max_new_tokens, seeds)]


@torch.inference_mode()
def greedy_test(
    answers: Sequence[list[int]],
    expected: Sequence[list[int]],
    prompts: Sequence[BenchPrompt],
    models: Models,
    config: LosslessConfig,
    reference: CausalLM | None,
) -> dict[str, Any]:
    """Compare greedy answers with autoregressive ones.

    In float32 the tokens must be equal. In other dtypes another number of rows rounds differently and may change a
    token, so there each token must be within MAX_GAP of the best logit of a float32 `reference`. In every dtype an
    answer must end with an end token or at its limit, so a truncated answer fails.
    """
    first_difference, gaps, all_end = None, [0.0], True
    for prompt, answer, wanted in zip(prompts, answers, expected, strict=True):
        room = room_for(prompt.prompt_ids, config.max_new_tokens, models.target.info)
        ends_well = ends_as_asked(answer, models.ends, room)
        all_end &= ends_well
        if first_difference is None and (not ends_well or (reference is None and answer != wanted)):
            differs = (i for i, (a, b) in enumerate(zip(answer, wanted, strict=False)) if a != b)
            first_difference = {"prompt": prompt.id, "place": next(differs, min(len(answer), len(wanted)))}
        if reference is not None and answer:
            # The best logit minus that of the answer's token, teacher-forced.
            ids = torch.tensor([[*prompt.prompt_ids, *answer]], device=reference.device)
            start = len(prompt.prompt_ids)
            logits = reference.lm_head(reference.features(ids)[0, start - 1 : -1]).double()  # [T, V]
            gap = logits.max(-1).values - logits.gather(-1, ids[0, start:, None])[:, 0]  # [T]
            gaps.append(float(gap.max()))

    identical = sum(answer == wanted for answer, wanted in zip(answers, expected, strict=True))
    close = all(gap <= MAX_GAP for gap in gaps)  # false for NaN
    row: dict[str, Any] = {
        "prompts": len(prompts),
        "tokens": sum(map(len, answers)),
        "identical": identical,
        "ended_as_asked": all_end,
        "first_difference": first_difference,
        "passed": all_end and (identical == len(prompts) if reference is None else close),
    }
    # NaN sorts first, so that it is what the result shows.
    return row if reference is None else row | {"largest_logit_gap": max(gaps, key=lambda gap: (gap != gap, gap))}


def sampling_test(
    runner: RecordingRunner, label: str, prompts: Sequence[BenchPrompt], config: LosslessConfig, level: float
) -> dict[str, Any]:
    """Sample answers of a method until `sampled_tokens` are tested, or until it has failed.

    Args:
        level: highest probability that a lossless method fails.
    """
    evidence, num_answers, tested, wrong_ends, failed = Evidence(), 0, 0, 0, False
    previous: dict[int, list[int]] = {}  # number of the prompt -> its last answer
    while tested < config.sampled_tokens and not failed:
        seeds, asked = [], []
        for number in range(num_answers, num_answers + config.batch_size):
            asked.append(number % len(prompts))
            parts = (config.seed, label, runner.rows > 1, prompts[asked[-1]].id, number)
            seeds.append(int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1)
        answers = runner([prompts[each].prompt_ids for each in asked], config.sampling, config.max_new_tokens, seeds)
        num_answers += len(answers)

        for each, (tokens, places) in zip(asked, answers, strict=True):
            prompt = prompts[each].prompt_ids
            room = room_for(prompt, config.max_new_tokens, runner.target.info)
            wrong_ends += not ends_as_asked(tokens, runner.ends, room)
            if not tokens:
                continue
            decided, impossible = decided_tokens(
                runner.target, prompt, tokens, places, previous.get(each, []), config.sampling, MAX_GAP
            )
            evidence.impossible += impossible
            for part in decided.parts():
                evidence.add(part)
            previous[each] = tokens
            tested += len(tokens)
        failed = wrong_ends > 0 or not evidence.p_value > level  # also for NaN
    return {
        "answers": num_answers,
        "tokens": tested,
        "p_value": evidence.p_value,
        "level": level,
        "strongest_bet": evidence.strongest,
        "impossible": evidence.impossible,
        "wrong_ends": wrong_ends,
        "passed": not failed,
    }


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
                finds = "" if test["passed"] else test["strongest_bet"]
                if test["wrong_ends"]:
                    finds = f"{test['wrong_ends']} answers end wrong"
                elif test["impossible"]:
                    finds = f"{test['impossible']} impossible tokens"
                cells = (f"{test['tokens']:,}", f"{test['p_value']:.2g}", finds)

            conclusion = Text("lossless", "green") if row["passed"] else Text("NOT lossless", "red")
            if not verdict["lossless"]:
                conclusion.append(", by its rule")
            rows.append((verdict["method"], row["loop"], greedy_cell, *cells, conclusion))
    return table_from_cells("verdicts", ("method", "loop", "greedy", "tokens", "p", "finds", "verdict"), rows)

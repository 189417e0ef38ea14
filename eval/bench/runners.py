"""The methods of a bench, ready to answer at every temperature, and traced again when the clocks are off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.data.models.loading import load_tokenizer
from draftsmith.data.store.files import write_json
from draftsmith.data.store.reading import read_lines
from draftsmith.eval.bench.hf_baseline import HFRunner, load_hf_model
from draftsmith.eval.bench.learned import built_for_each
from draftsmith.eval.bench.measure import BatchRunner, BenchPrompt, EngineRunner, GroupRunner, OneByOne
from draftsmith.eval.bench.trace import TEXTS, TRACE, TracedRunner, TraceFile, about
from draftsmith.eval.methods.base import Method, Models, Named, check_rows
from draftsmith.eval.methods.hf import HFAssisted, HFGenerate
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.targets.base import Session
from draftsmith.modules.types import SamplingParams


def make_runners(
    config: Any, named: Sequence[Named], models: Models, modes: Sequence[SamplingParams], eos_ids: tuple[int, ...]
) -> dict[float, dict[str, GroupRunner]]:
    """Temperature -> label -> method. Sessions serve every temperature, and drafters that learn nothing; transformers'
    models are loaded only for the methods that use them."""
    sessions: dict[tuple[int, ...], Session] = {}  # by what is captured
    loaded: dict[str, Any] = {}

    def hf_model(flag: str) -> Any:
        if flag not in loaded:
            path = str(models.paths[flag])
            loaded[flag] = load_hf_model(path, config.dtype, config.device, config.trust_remote_code)
        return loaded[flag]

    def session_for(drafter: Drafter | None) -> Session:
        capture = () if drafter is None else drafter.capture
        if capture not in sessions:
            sessions[capture] = models.target.session(config.batch_size, models.capacity, capture)
        return sessions[capture]

    if config.batch_size > 1:
        check_rows("target", models.target)
        check_rows("draft", models.draft)
    runners: dict[float, dict[str, GroupRunner]] = {params.temperature: {} for params in modes}
    for label, method in ((item.label, item.method) for item in named):
        made: list[GroupRunner]
        if isinstance(method, HFAssisted):
            extra = (hf_model("draft"), method.k, method.t)
            made = [OneByOne(HFRunner(hf_model("target"), params, eos_ids, *extra)) for params in modes]
        elif isinstance(method, HFGenerate):
            made = [OneByOne(HFRunner(hf_model("target"), params, eos_ids)) for params in modes]
        else:
            drafters = built_for_each(partial(method.build, models, config.batch_size), len(modes))
            session = session_for(drafters[0])
            made = [
                BatchRunner(models.target, session, drafter, params, eos_ids, models.paths)
                for drafter, params in zip(drafters, modes, strict=True)
            ]
        for params, each in zip(modes, made, strict=True):
            runners[params.temperature][label] = each
    return runners


def one_by_one(
    method: Method,
    models: Models,
    modes: Sequence[SamplingParams],
    eos_ids: tuple[int, ...],
    session: Session | None = None,
) -> list[EngineRunner]:
    """A method of this engine, one prompt at a time: a runner for every way of sampling."""
    drafters = built_for_each(partial(method.build, models), len(modes))
    return [
        EngineRunner(models.target, drafter, params, eos_ids, session=session, paths=models.paths)
        for drafter, params in zip(drafters, modes, strict=True)
    ]


def engine_runners(
    named: Sequence[Named], models: Models, modes: Sequence[SamplingParams], eos_ids: tuple[int, ...]
) -> dict[float, dict[str, EngineRunner]]:
    """Temperature -> label -> this engine's own methods, one prompt at a time, whose rounds can be traced."""
    found: dict[float, dict[str, EngineRunner]] = {params.temperature: {} for params in modes}
    for item in named:
        if not isinstance(item.method, HFGenerate | HFAssisted):
            for runner in one_by_one(item.method, models, modes, eos_ids):
                found[runner.params.temperature][item.label] = runner
    return found


def first_of_each_task(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The baseline's rows that hold the first `count` questions of each task, in all their turns."""
    numbers: dict[str, list[int]] = {}
    for row in rows:
        seen = numbers.setdefault(row["task"], [])
        if row["prompt"] not in seen and len(seen) < count:
            seen.append(row["prompt"])
    return [row for row in rows if row["prompt"] in numbers[row["task"]]]


def trace_again(
    directory: Path,
    rows: Sequence[Mapping[str, Any]],
    engine: Mapping[float, Mapping[str, EngineRunner]],
    max_new_tokens: int,
    seeds: Callable[[Sequence[BenchPrompt]], Sequence[int]],
) -> None:
    """One more run of every engine method on the prompts of these rows, off the clock: trace.jsonl, a line a round.

    rows: of the baseline, with prompt_ids. engine: temperature -> label -> runner.
    """
    file = TraceFile(directory / TRACE)
    for row in rows:
        prompt = BenchPrompt(row["id"], list(row["prompt_ids"]), row["task"], turn=row["turn"], number=row["prompt"])
        for label, runner in engine[row["temperature"]].items():
            traced = TracedRunner(about(label, row["temperature"], prompt), runner, file)
            traced(prompt.prompt_ids, max_new_tokens, seeds([prompt])[0])
            file.flush()


def write_texts(directory: Path, target: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """texts.json, what trace.jsonl reads like: `tokens`, the text of every token in it by its id, and `prompts`, one
    for each of the traced rows by its number and turn, "0/1"."""
    tokenizer = load_tokenizer(target)
    ids: set[int] = set()
    for found in read_lines(directory / TRACE, {"emitted": [int], "drafted?": [int]}):
        ids |= {*found["emitted"], *found.get("drafted", ())}
    tokens = {str(i): tokenizer.decode([i]) for i in sorted(ids)}
    prompts = {f"{row['prompt']}/{row['turn']}": tokenizer.decode(row["prompt_ids"]) for row in rows}
    write_json(directory / TEXTS, {"tokens": tokens, "prompts": prompts})

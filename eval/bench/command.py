"""`draftsmith eval bench`: methods measured against each other, prompt by prompt on the same machine."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.console import add_result, log_done, log_note, print_table, print_text, tables_from_json
from draftsmith.data.settings import check_left_out
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.measuring import REMEDY, Journal, PromptRunner
from draftsmith.eval.bench.prompts import read_questions, task_sources
from draftsmith.eval.bench.replay import replay
from draftsmith.eval.bench.results import (
    BASELINE,
    PER_PROMPT,
    add_kinds,
    counts_by_answer,
    failures_of,
    of_methods,
    read_rows,
    shown_classes,
    summarize,
    write_rows,
)
from draftsmith.eval.bench.runner import DRAFT_ROOM, check_methods, load_run, make_runners
from draftsmith.eval.bench.tables import results_tables
from draftsmith.eval.meta import RESULTS, describe
from draftsmith.eval.settings import BenchConfig
from draftsmith.modules.drafters import MODEL
from draftsmith.modules.drafters.method_names import LabeledMethod, parse_methods
from draftsmith.modules.pretrained.card import CARD, WEIGHTS, write_measured
from draftsmith.modules.pretrained.checkpoint import checkpoint_of
from draftsmith.modules.pretrained.files import write_json
from draftsmith.modules.pretrained.provenance import changes, file_sha256
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.types import InputError, check_ranges, without_controls

# Options that change nothing of what is measured: a resumed run may have others.
INCIDENTAL = ("output", "card", "traces", "again")


def run(config: BenchConfig) -> int:
    """Measure or replay, print the tables and write `output`/results.json. Return 1 if prompts failed, else 0."""
    if config.replay is not None:
        named = by_each({item.label: item for item in parse_methods(config.methods)}, config.paths)
        results = replay(config, named)
        for table in tables_from_json(results):
            print_table(table)
        for row in results["methods"]:
            for line in row["verdict"]:
                print_text(f"{row['method']}: {line}")
        add_result(slices={row["method"]: row["slices"] for row in results["methods"]})
        log_note(f"Written to {config.output / RESULTS}")
        return 0
    check_left_out(config, ("server",), "without --replay", "none: decoding needs the whole target")
    results = bench(config)
    for table in results_tables(results):
        print_table(table, bold="fastest")
    for failure in results["failures"]:
        where = ", ".join(str(failure[key]) for key in ("task", "id") if failure[key])
        about = f"turn {failure['turn']}, temperature {failure['temperature']:g}"
        said = f"draftsmith: failed: prompt {where} ({about}): {failure['error']}"
        print(without_controls(said), file=sys.stderr)
    return 1 if results["failures"] else 0


@sole_writer()
def bench(config: BenchConfig) -> dict[str, Any]:
    """Measure, write the run's files, and return what results.json holds: meta, methods and failures.

    Raises:
        InputError: bad options, models or prompts; an unfinished run of other options in `output`; no prompt that
            could be measured.
    """
    requested = {item.label: item for item in parse_methods(config.methods)}
    # Every speed-up is over ar, so that it is always measured, first.
    named = by_each({BASELINE: parse_methods(BASELINE)[0]} | requested, config.paths)
    heads = check(config, named)
    torch.set_num_threads(config.num_threads)
    journal = Journal(config.output)

    # Load.
    config, checkpoint = config.open(config.target)
    sources, choice = task_sources(config.data), (config.split, config.tasks, config.limit)
    files = read_questions(sources, checkpoint, *choice, config.turns, config.columns)
    prompts = [prompt for file in files for prompt in file]
    models = load_run(config, checkpoint, named, prompts, config.modes, later_turns=True)
    target, tokenizer = models.target, checkpoint_of(models.target).tokenizer
    drafts = {key: model for key, model in models.others.items() if key.startswith(f"{MODEL}@")}
    smaller = {MODEL: models.draft, "mid": models.mid, **drafts}
    meta = describe(
        "bench",
        config,
        prompts,
        str(config.data),
        seed=config.seed,
        target={**target.info.identity, **checkpoint_of(target).tokenizer_identity},
        models={role: lm.info.identity for role, lm in smaller.items() if lm is not None},
        clock=config.clock,
        methods={item.label: dataclasses.asdict(item.method) for item in named},
        heads={kind: {"path": path, "sha256": file_sha256(Path(path) / WEIGHTS)} for kind, path in heads.items()},
        temperatures=[params.temperature for params in config.modes],
        eos_ids=list(models.ends),
        names=[[prompt.id, prompt.task] for prompt in prompts],
    )
    done = None if config.again else finished(config, meta, journal)
    if done is not None:
        log_done("eval bench", config.output, measures=True)
        if config.card:
            write_cards(done, named, heads, config)
        return done

    # Measure.
    models.times.load_state_dict(journal.times)
    # Building runners measures costs, which meta holds.
    runners = make_runners(named, models, config.modes)
    meta |= models.times.state_dict()
    journal.start(depends_on(meta), models.times.state_dict())
    context, room = target.info.max_position, models.capacity - DRAFT_ROOM
    prompt_runner = PromptRunner(runners, tokenizer, context, room, config.max_new_tokens, config.repeats, config.seed)
    rows = prompt_runner.run_all(prompts, journal)

    # Summarize and write.
    add_kinds(rows, tokenizer)
    methods: list[dict[str, Any]] = []
    for params in config.modes:
        compare = params.greedy and target.dtype == torch.float32
        how = config.clock, config.seed, compare, params.temperature, config.divisions
        methods += summarize(of_methods(rows, params.temperature), *how)
    results = {"meta": meta, "methods": methods, "failures": failures_of(rows)}
    if config.traces:
        from draftsmith.eval.bench.trace import write_traces

        write_traces(config, rows, named, models)
    # A results.json always belongs to the rows beside it.
    (config.output / RESULTS).unlink(missing_ok=True)
    write_rows(config.output / PER_PROMPT, rows)
    write_json(config.output / RESULTS, results)
    journal.path.unlink()
    log_note(f"Written to {config.output / RESULTS}")
    if config.card:
        write_cards(results, named, heads, config)
    return results


def depends_on(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the numbers of a run depend on, of its `meta`."""
    names = ("cpu", "gpu", "torch_threads")
    return {
        "settings": {name: value for name, value in meta["settings"].items() if name not in INCIDENTAL},
        **{name: meta.get(name) for name in ("target", "models", "heads", "prompts", "versions", "names")},
        "hardware": {name: meta["hardware"].get(name) for name in names},
    }


def finished(config: BenchConfig, meta: Mapping[str, Any], journal: Journal) -> dict[str, Any] | None:
    """Return the results that `output` holds of this very run; None if there is something to measure.

    Raises:
        InputError: it holds the results of another run.
    """
    files = [RESULTS, PER_PROMPT, *(["trace.jsonl"] if config.traces else [])]
    if journal.path.exists() or not all((config.output / name).exists() for name in files):
        return None
    there = read_object(config.output / RESULTS, {"meta": {"settings": dict, "hardware": dict}}, REMEDY)
    before, now = (json.loads(json.dumps(depends_on(one))) for one in (there["meta"], meta))
    if changed := changes(now, before):
        found, remedy = f"{config.output}, measured with another {changed}", "Choose another output, or pass --again."
        raise InputError("output", found, "what it was measured with", remedy)
    traced = not config.traces or there["meta"]["settings"].get("traces") == config.traces
    return there if traced else None


def check(config: BenchConfig, named: Sequence[LabeledMethod]) -> dict[str, str]:
    """Check the options before anything is loaded. Return the heads that some method uses: kind -> directory.

    Raises:
        InputError: an option out of range, a missing model, ...
    """
    check_ranges(config, repeats=1, num_threads=1, max_new_tokens=1, limit=0, traces=0)
    check_methods(named, config.paths)
    used = {need for item in named for need in item.keys(config.paths) if need.partition("@")[0] not in (MODEL, "mid")}
    heads = {need: path for need, path in config.paths.items() if need in used}
    if config.card and not heads:
        remedy = "Pass --head HEAD or --acceptance HEAD with a method that uses it, or leave --card out."
        raise InputError("card", "no method that uses a head", "a head to write the card of", remedy)
    _ = config.chosen_device, config.modes  # checks the device and the temperatures
    return heads


def by_each(requested: Mapping[str, LabeledMethod], paths: Mapping[str, str]) -> list[LabeledMethod]:
    """Return the methods, each once for every drafter of its kind where several were passed."""
    named: list[LabeledMethod] = []
    for item in requested.values():
        needs = tuple(f"{need}@" for need in item.method.needs)
        variants = [f"@{key.partition('@')[2]}" for key in paths if needs and key.startswith(needs)]
        named += [item] if item.variant or not variants else [item.by(variant) for variant in variants]
    return named


def write_cards(
    results: Mapping[str, Any], named: Sequence[LabeledMethod], heads: Mapping[str, str], config: BenchConfig
) -> None:
    """Write the rows of the methods that used each head into its measured.json and model card."""
    names = ("tau", "tau_ci95", "prompts", "tokens", "speedup", "speedup_ci95", "matches_ar")
    answers = read_rows(config.output)
    about = ("date", "git_commit", "clock", "hardware", "versions", "prompts", "target", "settings")
    meta = {name: results["meta"][name] for name in about}
    for kind, directory in heads.items():
        labels = {item.label for item in named if kind in item.keys(config.paths)}
        rows = [
            {
                **{key: row[key] for key in ("method", "temperature", *names)},
                "by": {name: [short(part, names) for part in shown_classes(row, name)] for name in row["by"]},
                "answers": counts_by_answer(of_methods(answers, row["temperature"])[row["method"]]),
            }
            for row in results["methods"]
            if row["method"] in labels
        ]
        write_measured(directory, {**meta, "methods": rows})
        log_note(f"Model card: {Path(directory) / CARD}")


def short(part: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return what a card keeps of a class: all of one of rounds, these numbers of one of answers."""
    return dict(part) if "rounds" in part else {name: part[name] for name in ("name", *names)}

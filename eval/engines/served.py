"""`draftsmith eval served`: a drafter in a server, by requests at once and draft length, beside plain decoding.

One request's answer is timed from its first token to its last, and tokens per second are those of all requests
together while they generate: requests at once x tokens / seconds. The reading of the prompt is in the time to the first
token. As many prompts as there are requests at once begin together. The load is constant: while the last of them are
answered, others that do not count keep the server as busy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shlex
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.data.console import (
    Column,
    Table,
    format_interval,
    json_values,
    log_note,
    print_table,
    print_text,
    tables_to_json,
)
from draftsmith.data.engines.llamacpp import server_binary
from draftsmith.data.engines.process import running
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt, read_questions, task_sources
from draftsmith.eval.bench.results import Resamples
from draftsmith.eval.bench.tables import places_table
from draftsmith.eval.clock import rotated
from draftsmith.eval.engines.chain import Counted, EngineAnswer, accepted_by_place, tau_of
from draftsmith.eval.engines.llamacpp import LlamaCppClient, ServedModels, server_words
from draftsmith.eval.engines.vllm import ENVIRONMENT, VllmClient, engine_python
from draftsmith.eval.engines.vllm import server_words as server_words_vllm
from draftsmith.eval.meta import RESULTS, describe
from draftsmith.eval.settings import SYSTEMS, ServedConfig
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Served
from draftsmith.modules.formats.commands import served_kind, vllm_command
from draftsmith.modules.formats.foreign import Names, head_kind
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.directory import foreign_package, gguf_file, package_directory
from draftsmith.modules.pretrained.files import write_json
from draftsmith.modules.pretrained.gguf import is_gguf_model
from draftsmith.modules.types import InputError

SCHEDULES = {"vllm": "vllm-schedule.json", "sglang": "sglang-schedule.json"}
Client = LlamaCppClient | VllmClient
KRange = tuple[int, int, int]  # first and last number of requests at once, and K


@dataclass(frozen=True)
class Setting:
    """Draft length of a server, 0 without a drafter and None if unknown, and llama.cpp's threshold."""

    num_drafted: int | None
    p_min: float = 0.0


PLAIN = Setting(0)


@dataclass
class Measured:
    """Answers of one setting at one load.

    answers: of the prompts in their order, once a repeat. counted: of each group, with those that did not count.
    """

    answers: list[EngineAnswer] = dataclasses.field(default_factory=list)
    counted: list[Counted] = dataclasses.field(default_factory=list)


Cells = dict[tuple[Setting, int], Measured]


@sole_writer()
def run(config: ServedConfig) -> int:
    """Measure, print the tables and write results.json and the servers' schedules.

    Raises:
        InputError: no GGUF files, fewer prompts than requests at once, or a server that does not start or answer.
    """
    sources = task_sources(config.data)
    files = read_questions(sources, Checkpoint(config.target), config.split, config.tasks, config.limit, "first")
    prompts = [prompt for file in files for prompt in file]
    if config.loads[-1] > len(prompts):
        found = f"{config.loads[-1]} requests at once of {len(prompts)} prompts"
        raise InputError("concurrency", found, "as many prompts or more", "Raise --limit, or pass more prompts.")
    cells: Cells = {}
    for settings in servers(config, prompts):
        measure(config, prompts, settings, cells)
    rows = [summary(setting, load, cells, prompts, config.temperature) for setting, load in cells]
    rows.sort(key=lambda row: row["requests"])
    drafting = [row for row in rows if row["num_drafted"] and "speedup" in row]
    if drafting and not any(row["accepted_by_place"] for row in drafting):
        found = f"{config.head}, of which nothing was drafted"
        raise InputError("head", found, "a drafter", "Read the server's log.")

    title = f"{Path(config.target).name} in {SYSTEMS.get(config.engine, 'SGLang')}, {len(prompts)} prompts"
    tables = [load_table(rows, f"{title}, threads: {config.num_threads}"), *drafts_table(rows)]
    schedules = write_schedules(config, rows) if config.engine == "vllm" and drafting else {}
    meta = describe("served", config, prompts, config.data)
    results = {"meta": meta, "tables": tables_to_json(tables), "rows": rows, "schedules": schedules}
    write_json(config.output / RESULTS, json_values(results))
    for table in tables:
        print_table(table)
    for load in config.loads if drafting else ():
        print_text(advice([row for row in drafting if row["requests"] == load], len(config.loads) > 1))
    log_note(f"Written to {config.output}: {', '.join([RESULTS, *schedules])}")
    return 0


# -- servers


def servers(config: ServedConfig, prompts: Sequence[BenchPrompt]) -> Iterator[Mapping[Setting, Client]]:
    """Yield clients of servers that run at the same time, by their settings, until all settings came."""
    answer = config.max_new_tokens, config.temperature
    if config.server is not None and config.engine == "llamacpp":
        yield {Setting(None): LlamaCppClient(config.server, *answer)}
    elif config.server is not None:
        client = VllmClient(config.server, config.target, *answer, metrics=config.engine == "vllm")
        yield {Setting(len(client.counts().by_place) or None): client}
    else:
        longest = max(len(prompt.prompt_ids) for prompt in prompts) + config.max_new_tokens + 2
        yield from (llamacpp_servers if config.engine == "llamacpp" else vllm_servers)(config, longest)


def llamacpp_servers(config: ServedConfig, longest: int) -> Iterator[Mapping[Setting, Client]]:
    """Start llama.cpp's servers of all settings. longest: prompt with its answer."""
    assert config.head is not None
    drafter, target = gguf_file(config.head), Path(config.target)
    if drafter is None or target.suffix != ".gguf" or not target.is_file():
        found = f"{target} and {config.head}"
        raise InputError("head", found, "two GGUF files", "Export the head with --format llamacpp.")
    kind = "simple" if is_gguf_model(drafter) else head_kind(foreign_package(drafter))
    binary, drafting = server_binary(config.engine_path), ServedModels(target, drafter, f"draft-{served_kind(kind)}")
    settings = [PLAIN, *(Setting(n, p_min) for n in config.lengths if n for p_min in config.thresholds)]
    with contextlib.ExitStack() as stack:
        clients: dict[Setting, Client] = {}
        for setting in settings:
            models, length = drafting if setting.num_drafted else ServedModels(target), setting.num_drafted or 0
            context = longest + config.lengths[-1]
            words = server_words(binary, models, context, length, setting.p_min, config.loads[-1], config.num_threads)
            url = stack.enter_context(running(words, {}))
            clients[setting] = LlamaCppClient(url, config.max_new_tokens, config.temperature)
        yield clients


def vllm_servers(config: ServedConfig, longest: int) -> Iterator[Mapping[Setting, Client]]:
    """Start a vLLM server of one setting after another. longest: prompt with its answer."""
    assert config.head is not None
    python, package = engine_python(config.engine_path), foreign_package(config.head)
    kind = "draft_model" if Names(package).causal_lm else head_kind(package)
    if kind != "draft_model" and ("vllm", kind) not in formats():
        raise InputError("head", f"a head of kind {kind}", "one that vLLM serves", "Export it with --format vllm.")
    opened = Checkpoint(config.target)
    target = str(opened.directory)
    directory = str(package_directory(str(config.head)).absolute())
    context = longest + 2 * config.lengths[-1]
    # On a CPU vLLM compiles for minutes.
    eager = not torch.cuda.is_available()
    for length in sorted({0, *config.lengths}):
        served = Served(target, directory, length, opened.facts.served_family)
        printed = vllm_command(kind, served) if length else f"vllm serve {shlex.quote(target)}"
        words = server_words_vllm(python, printed, "auto", context, eager, config.loads[-1])
        with running(words, {**ENVIRONMENT, "OMP_NUM_THREADS": str(config.num_threads)}) as url:
            yield {Setting(length): VllmClient(url, opened, config.max_new_tokens, config.temperature)}


# -- measurement


def measure(
    config: ServedConfig, prompts: Sequence[BenchPrompt], clients: Mapping[Setting, Client], cells: Cells
) -> None:
    """Ask servers that run at the same time all prompts at every load, in turn."""
    settings = list(clients)
    for each in clients.values():
        ask(each, prompts[:1], 1)  # a first answer pays for what is made once
    for repeat in range(config.repeats):
        for load in config.loads:
            # Settings take turns at every group, so that a machine that slows down slows all alike.
            for number, start in enumerate(range(0, len(prompts), load)):
                group = prompts[start : start + load]  # begin together
                for setting in rotated(settings, repeat + number):
                    cell = cells.setdefault((setting, load), Measured())
                    client: Any = clients[setting]
                    before = client.counts()
                    answers, others = ask(client, group, load)
                    everything = [*answers, *others]
                    cell.answers += answers
                    cell.counted.append(Counted.of(everything, client.counts_since(before, everything, len(answers))))
            log_note(f"answered {len(prompts)} prompts, {load} at once ({repeat + 1} of {config.repeats})")


def ask(client: Client, prompts: Sequence[BenchPrompt], load: int) -> tuple[list[EngineAnswer], list[EngineAnswer]]:
    """Answer all prompts with `load` requests at once throughout. Return the answers, and those that do not count."""
    answers: dict[int, EngineAnswer] = {}
    others: list[EngineAnswer] = []
    errors: list[Exception] = []
    numbers, done = itertools.count(), threading.Event()

    def work() -> None:
        while not done.is_set():
            number = next(numbers)
            try:
                answer = client.complete(prompts[number % len(prompts)].prompt_ids, number, done)
            except Exception as error:
                errors.append(error)
                done.set()
                return
            if number < len(prompts):
                answers[number] = answer
            else:
                others.append(answer)
            if len(answers) == len(prompts):
                done.set()

    # Not a pool, which Ctrl-C would not end before the server has answered.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [answers[number] for number in range(len(prompts))], others


def summary(
    setting: Setting, load: int, cells: Cells, prompts: Sequence[BenchPrompt], temperature: float
) -> dict[str, Any]:
    """Return the row of one setting at one load. Speed-up is over the plain server at this load, paired by prompt."""
    cell, plain = cells[setting, load], cells.get((PLAIN, load))
    answers = cell.answers
    # The first token of an answer comes from reading the prompt.
    tokens, seconds = [one.num_tokens - 1 for one in answers], [one.generation_s for one in answers]
    if 0 in (sum(seconds), sum(tokens)):
        raise InputError("data", "answers of one token each", "longer ones, to time", "Choose other prompts.")
    # A server that counts nothing may draft all the same.
    known = setting == PLAIN or any(one.counts for one in cell.counted)
    row: dict[str, Any] = {
        "requests": load,
        "num_drafted": setting.num_drafted,
        "p_min": setting.p_min,
        "tokens_per_s": load * sum(tokens) / sum(seconds),
        "first_token_s": statistics.median(one.first_s for one in answers),
        "tau": tau_of(cell.counted) if known else None,
        "accepted_by_place": accepted_by_place(cell.counted),
    }
    if plain is None:
        return row
    base_tokens, base_s = ([one.num_tokens - 1 for one in plain.answers], [one.generation_s for one in plain.answers])
    # Prompts that were timed together are drawn together.
    resamples = Resamples([number % len(prompts) // load for number in range(len(answers))], seed=0)
    interval = resamples.interval(
        resamples.sums(tokens) / resamples.sums(seconds) * resamples.sums(base_s) / resamples.sums(base_tokens)
    )
    differing = sum(one.tokens != other.tokens for one, other in zip(answers, plain.answers, strict=True))
    return {
        **row,
        "speedup": sum(tokens) / sum(seconds) * sum(base_s) / sum(base_tokens),
        "speedup_ci95": None if setting == PLAIN else interval,
        "num_differing": None if temperature else differing,
    }


# -- tables, advice, schedules


def label_of(row: Mapping[str, Any]) -> str:
    """Return the name of a row's setting."""
    if not row["num_drafted"]:
        return "plain" if row["num_drafted"] == 0 else "as served"
    return f"K={row['num_drafted']}" + (f", p-min={row['p_min']:g}" if row["p_min"] else "")


def load_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return the table of all settings at all loads."""
    columns = [
        Column("requests", "at once", "d"),
        Column("setting", "drafts"),
        Column("tokens_per_s", "tokens/s", ",.1f"),
    ]
    if any("speedup" in row for row in rows):
        columns += [Column("speedup", "speed-up", ".2fx"), Column("speedup_ci", "95 % CI", below=True)]
    columns += [Column("tau", "tau", ".2f"), Column("first_ms", "TTFT, ms", ",.0f")]
    cells = []
    for row in rows:
        differing, interval = row.get("num_differing"), format_interval(row.get("speedup_ci95"))
        equal = "" if differing is None else f"no ({differing})" if differing else "yes"
        cells.append({**row, "setting": label_of(row), "speedup_ci": interval, "equal": equal})
        cells[-1]["first_ms"] = 1e3 * row["first_token_s"]
    if any(cell["equal"] for cell in cells):
        columns.append(Column("equal", "= plain"))
    note = (
        "tokens/s: of all requests together while they generate; TTFT: median time to the first token; speed-up over "
        "the plain server at the same load, 95 % bootstrap intervals over what began together; tau: emitted tokens per "
        "target call."
    )
    return Table("served", title, columns, cells, note)


def drafts_table(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the table of acceptance by place at the smallest load, if drafts were counted."""
    rows = [row for row in rows if row["accepted_by_place"] and row["requests"] == rows[0]["requests"]]
    named = [{**row, "drafts": label_of(row)} for row in rows]
    note = "Share of the rounds with a draft whose first n tokens were accepted."
    return [places_table(named, "served-places", "Accepted by place in the draft", note, "drafts")] if rows else []


def advice(rows: Sequence[Mapping[str, Any]], several: bool) -> str:
    """Say which setting to serve with at one load, if its interval excludes a slow-down. rows: those that draft."""
    best = max(rows, key=lambda row: row["speedup"])
    low = (best["speedup_ci95"] or [0.0])[0]
    at = f"Requests at once: {best['requests']}. " if several else ""
    if low > 1:
        return f"{at}Serve with {label_of(best)}: {best['speedup']:.2f}x the plain server."
    if best["speedup"] > 1:
        return (
            f"{at}{label_of(best)} measured {best['speedup']:.2f}x the plain server, which more prompts must confirm."
        )
    return f"{at}Do not speculate: the best setting, {label_of(best)}, is {best['speedup']:.2f}x the plain server."


def write_schedules(config: ServedConfig, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the best draft length by requests at once, as vLLM and SGLang read it. Return the files' content."""
    seconds: dict[int, dict[int, float]] = {}
    for row in rows:
        seconds.setdefault(row["num_drafted"], {})[row["requests"]] = row["requests"] / row["tokens_per_s"]
    # A vLLM server whose schedule went to K = 0 fell from 232 to 24-157 tokens/s (vllm#49548).
    drafting = {k: curve for k, curve in seconds.items() if k}
    content = {
        SCHEDULES["vllm"]: vllm_config(ranges(best_lengths(drafting))),
        SCHEDULES["sglang"]: sglang_config(ranges(best_lengths(seconds))),
    }
    for name, schedule in content.items():
        write_json(config.output / name, schedule, indent=None)
    return content


def best_lengths(seconds: Mapping[int, Mapping[int, float]]) -> list[int]:
    """Return the fastest K for 1 to the most requests that were measured, the smallest of equal ones.

    seconds: K -> requests at once -> seconds of a token of one request. Between measured numbers of requests they are
    interpolated.
    """
    most = max(max(curve) for curve in seconds.values())

    def token_s(k: int, load: int) -> float:
        return float(np.interp(load, [*seconds[k]], [*seconds[k].values()]))

    return [min(sorted(seconds), key=lambda k: token_s(k, load)) for load in range(1, most + 1)]


def ranges(lengths: Sequence[int]) -> list[KRange]:
    """Merge equal neighbors: K for 1 to B requests -> (first, last, K)."""
    merged: list[KRange] = []
    for size, k in enumerate(lengths, start=1):
        if merged and merged[-1][2] == k:
            merged[-1] = (merged[-1][0], size, k)
        else:
            merged.append((size, size, k))
    return merged


def vllm_config(k_ranges: Sequence[KRange]) -> dict[str, Any]:
    """Return a part of vLLM's --speculative-config (0.32, 0.33); above the last range its K holds."""
    longest = max(k for _, _, k in k_ranges)
    by_batch = [list(each) for each in k_ranges]
    return {"num_speculative_tokens": longest, "num_speculative_tokens_per_batch_size": by_batch}


def sglang_config(k_ranges: Sequence[KRange]) -> dict[str, Any]:
    """Return SGLang's --speculative-adaptive-config (0.5.23): the smallest batch size -> the allowed steps.

    With a single candidate SGLang's acceptance rates change nothing.
    """
    return {str(first): {"candidate_steps": [k]} for first, _, k in k_ranges}

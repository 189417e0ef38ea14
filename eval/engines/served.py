"""`draftsmith eval served`: a drafter in a server, by requests at once, context and draft length, beside no drafter.

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
import sys
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
from draftsmith.data.text.lengths import length_name
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

Client = LlamaCppClient | VllmClient
KRange = tuple[int, int, int]  # first and last number of requests at once, and K


@dataclass(frozen=True)
class Setting:
    """Draft length of a server, 0 without a drafter and None if unknown, and llama.cpp's threshold."""

    num_drafted: int | None
    p_min: float = 0.0


PLAIN = Setting(0)
ALL = "all"  # contexts together
NO_CONTEXT = "No server drafts by context (vllm#54801 is open). Long prompts can have a server of their own."


@dataclass
class Measured:
    """Answers of one setting at one load.

    answers: of the prompts in their order, once a repeat. groups: of each answer, the number of the first prompt of
    those that began together. counted: of each group, with those that did not count.
    """

    answers: list[EngineAnswer] = dataclasses.field(default_factory=list)
    groups: list[int] = dataclasses.field(default_factory=list)
    counted: list[Counted] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Tokens of each answer behind its first, which comes from reading the prompt."""
        return [one.num_tokens - 1 for one in self.answers]

    @property
    def seconds(self) -> list[float]:
        return [one.generation_s for one in self.answers]


Cells = dict[tuple[Setting, int], Measured]


@dataclass(frozen=True)
class Context:
    """Prompts of a class of lengths (`below 1k`, `from 1k` up to the next class, or `all`), and their measurements."""

    name: str
    prompts: Sequence[BenchPrompt]
    cells: Cells = dataclasses.field(default_factory=dict)


def contexts_of(prompts: Sequence[BenchPrompt], edges: Sequence[int], most: int) -> list[Context]:
    """Divide prompts by their tokens into classes that begin at `edges`. most: requests at once.

    Raises:
        InputError: fewer prompts of a class than requests at once, unless there are none below the first edge.
    """
    contexts = []
    for low, high in itertools.pairwise((0, *edges, sys.maxsize)):
        own = [prompt for prompt in prompts if low <= len(prompt.prompt_ids) < high]
        name = f"from {length_name(low)}" if low else f"below {length_name(edges[0])}" if edges else ALL
        if own or low or not edges:
            contexts.append(Context(name, own))
        if contexts and most > len(own):
            found = f"{most} requests at once of {len(own)} prompts" + (f" {name} tokens" if edges else "")
            raise InputError("concurrency", found, "as many prompts or more", "Raise --limit, or pass more prompts.")
    return contexts if len(contexts) > 1 else [Context(ALL, prompts)]


def together(contexts: Sequence[Context]) -> Context:
    """Return all contexts as one, in which each counts as its prompts do."""
    whole = Context(ALL, [prompt for context in contexts for prompt in context.prompts])
    for context in contexts:
        for key, cell in context.cells.items():
            joined = whole.cells.setdefault(key, Measured())
            joined.answers += cell.answers
            joined.groups += cell.groups
            joined.counted += cell.counted
    return whole


@sole_writer()
def run(config: ServedConfig) -> int:
    """Measure, print the tables and write results.json and the servers' schedules.

    Raises:
        InputError: no GGUF files, fewer prompts than requests at once, or a server that does not start or answer.
    """
    sources = task_sources(config.data)
    files = read_questions(sources, Checkpoint(config.target), config.split, config.tasks, config.limit, "first")
    prompts = [prompt for file in files for prompt in file]
    contexts = contexts_of(prompts, config.edges, config.loads[-1])
    for settings in servers(config, prompts):
        measure(config, contexts, settings)
    contexts += [together(contexts)] if len(contexts) > 1 else []
    rows = [
        {"context": context.name, **summary(setting, load, context.cells, context.prompts, config.temperature)}
        for context in contexts
        for setting, load in context.cells
    ]
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
    for context, load in itertools.product(contexts, config.loads if drafting else ()):
        at = f"Context: {context.name}. " if len(contexts) > 1 else ""
        at += f"Requests at once: {load}. " if len(config.loads) > 1 else ""
        print_text(advice([row for row in drafting if (row["context"], row["requests"]) == (context.name, load)], at))
    if drafting and len(contexts) > 1:
        print_text("\n".join([NO_CONTEXT, *(cost_of_sharing(contexts, load) for load in config.loads)]))
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


def measure(config: ServedConfig, contexts: Sequence[Context], clients: Mapping[Setting, Client]) -> None:
    """Ask servers that run at the same time all prompts at every load, in turn."""
    settings = list(clients)
    for each in clients.values():
        ask(each, contexts[0].prompts[:1], 1)  # a first answer pays for what is made once
    for repeat in range(config.repeats):
        for load, context in itertools.product(config.loads, contexts):
            prompts = context.prompts
            # Settings take turns at every group, so that a machine that slows down slows all alike.
            for number, start in enumerate(range(0, len(prompts), load)):
                group = prompts[start : start + load]  # begin together
                for setting in rotated(settings, repeat + number):
                    cell = context.cells.setdefault((setting, load), Measured())
                    client: Any = clients[setting]
                    before = client.counts()
                    answers, others = ask(client, group, load)
                    everything = [*answers, *others]
                    cell.answers += answers
                    cell.groups += [group[0].number] * len(group)
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
    answers, tokens, seconds = cell.answers, cell.tokens, cell.seconds
    if 0 in (sum(seconds), sum(tokens)):
        raise InputError("data", "answers of one token each", "longer ones, to time", "Choose other prompts.")
    # A server that counts nothing may draft all the same.
    known = setting == PLAIN or any(one.counts for one in cell.counted)
    row: dict[str, Any] = {
        "requests": load,
        "num_drafted": setting.num_drafted,
        "p_min": setting.p_min,
        "prompt_tokens": statistics.fmean(len(prompt.prompt_ids) for prompt in prompts),
        "tokens_per_s": load * sum(tokens) / sum(seconds),
        "first_token_s": statistics.median(one.first_s for one in answers),
        "tau": tau_of(cell.counted) if known else None,
        "accepted_by_place": accepted_by_place(cell.counted),
    }
    if plain is None:
        return row
    speedup, interval = faster(cell, plain)
    differing = sum(one.tokens != other.tokens for one, other in zip(answers, plain.answers, strict=True))
    return {
        **row,
        "speedup": speedup,
        "speedup_ci95": None if setting == PLAIN else interval,
        "num_differing": None if temperature else differing,
    }


def faster(cell: Measured, base: Measured) -> tuple[float, list[float] | None]:
    """Return the speed of a setting over that of another on the same prompts, with its 95 % interval."""
    # Prompts that were timed together are drawn together.
    resamples = Resamples(cell.groups, seed=0)
    own, other = (resamples.sums(one.tokens) / resamples.sums(one.seconds) for one in (cell, base))
    ratio = sum(cell.tokens) / sum(cell.seconds) * sum(base.seconds) / sum(base.tokens)
    return ratio, resamples.interval(own / other)


# -- tables, advice, schedules


def label_of(row: Mapping[str, Any]) -> str:
    """Return the name of the setting of a row, or of a setting's fields."""
    if not row["num_drafted"]:
        return "plain" if row["num_drafted"] == 0 else "as served"
    return f"K={row['num_drafted']}" + (f", p-min={row['p_min']:g}" if row["p_min"] else "")


def load_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return the table of all settings at all loads."""
    columns = [
        Column("requests", "at once", "d"),
        *([Column("context", "context")] if len({row["context"] for row in rows}) > 1 else []),
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
    several = len({row["context"] for row in rows}) > 1
    named = [{**row, "drafts": label_of(row) + f", {row['context']}" * several} for row in rows]
    note = "Share of the rounds with a draft whose first n tokens were accepted."
    return [places_table(named, "served-places", "Accepted by place in the draft", note, "drafts")] if rows else []


def fastest(context: Context, load: int) -> Setting:
    """Return the setting with the fewest seconds a token at one load."""
    cells = {setting: cell for (setting, requests), cell in context.cells.items() if requests == load}
    return min(cells, key=lambda setting: sum(cells[setting].seconds) / sum(cells[setting].tokens))


def cost_of_sharing(contexts: Sequence[Context], load: int) -> str:
    """Say what the best setting for all contexts, the last, costs each of the others at one load."""
    costs, shared = list[str](), fastest(contexts[-1], load)
    for context in contexts[:-1]:
        own = fastest(context, load)
        ratio, interval = faster(context.cells[own, load], context.cells[shared, load])
        gain = f"{label_of(vars(own))} is {ratio:.2f}x as fast ({format_interval(interval) or 'of one group'})"
        costs.append(f"{context.name}: " + ("nothing" if own == shared else gain))
    return f"Lost with {label_of(vars(shared))} for all contexts, requests at once: {load}. {'; '.join(costs)}."


def advice(rows: Sequence[Mapping[str, Any]], at: str) -> str:
    """Say which setting to serve with, if its interval excludes a slow-down. rows: that draft. at: begins the text."""
    best = max(rows, key=lambda row: row["speedup"])
    low = (best["speedup_ci95"] or [0.0])[0]
    if low > 1:
        return f"{at}Serve with {label_of(best)}: {best['speedup']:.2f}x the plain server."
    if best["speedup"] > 1:
        return (
            f"{at}{label_of(best)} measured {best['speedup']:.2f}x the plain server, which more prompts must confirm."
        )
    return f"{at}Do not speculate: the best setting, {label_of(best)}, is {best['speedup']:.2f}x the plain server."


def write_schedules(config: ServedConfig, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the best draft length by requests at once, as vLLM and SGLang read it, for all contexts together and beside
    that for each. Return the files' content."""
    content: dict[str, Any] = {}
    for context in dict.fromkeys(row["context"] for row in rows):
        seconds: dict[int, dict[int, float]] = {}
        for row in (row for row in rows if row["context"] == context):
            seconds.setdefault(row["num_drafted"], {})[row["requests"]] = row["requests"] / row["tokens_per_s"]
        # A vLLM server whose schedule went to K = 0 fell from 232 to 24-157 tokens/s (vllm#49548).
        drafting = {k: curve for k, curve in seconds.items() if k}
        part = "" if context == ALL else f"-{context.replace(' ', '-')}"
        content[f"vllm-schedule{part}.json"] = vllm_config(ranges(best_lengths(drafting)))
        content[f"sglang-schedule{part}.json"] = sglang_config(ranges(best_lengths(seconds)))
    for earlier in config.output.glob("*-schedule-*.json"):
        earlier.unlink()  # of other contexts, measured before --again
    for name, schedule in content.items():
        write_json(config.output / name, schedule, indent=None)
    return content


def call_seconds(rows: Sequence[Mapping[str, Any]], load: float) -> dict[int, float]:
    """Return the seconds of a round of one request by draft length, at a number of requests at once.

    If n or more tokens of a share s_n of the drafts are accepted, a request gets about
    (1 + s_1 + ... + s_K) / call_seconds(rows, load)[K] tokens a second.

    rows: of results.json, of which those of one context of several, of uncounted drafts, and with a p-min (drafts of
    several lengths) are left out. load: between measured ones; outside of them nothing is returned.
    """
    seconds: dict[int, dict[int, float]] = {}
    for row in rows:
        k, requests, accepted = row["num_drafted"], row["requests"], row["accepted_by_place"]
        counted = k == 0 or (k and accepted and not row["p_min"])
        if counted and row.get("context", ALL) == ALL:  # earlier runs were of all
            seconds.setdefault(k, {})[requests] = (1 + sum(accepted)) * requests / row["tokens_per_s"]
    return {k: at_load(curve, load) for k, curve in seconds.items() if min(curve) <= load <= max(curve)}


def at_load(seconds: Mapping[int, float], load: float) -> float:
    """Interpolate seconds between measured numbers of requests at once."""
    return float(np.interp(load, [*seconds], [*seconds.values()]))


def best_lengths(seconds: Mapping[int, Mapping[int, float]]) -> list[int]:
    """Return the fastest K for 1 to the most requests that were measured, the smallest of equal ones.

    seconds: K -> requests at once -> seconds of a token of one request.
    """
    most = max(max(curve) for curve in seconds.values())
    return [min(sorted(seconds), key=lambda k: at_load(seconds[k], load)) for load in range(1, most + 1)]


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

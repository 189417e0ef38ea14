"""`draftsmith eval served`: speed and acceptance length of a drafter in llama.cpp's server, beside plain decoding."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.console import Column, Table, format_interval, log_note, print_table, print_text
from draftsmith.data.engines.llamacpp import server_binary
from draftsmith.data.engines.process import running
from draftsmith.data.export.directory import gguf_file
from draftsmith.data.export.gguf import is_gguf_model
from draftsmith.data.models.gguf import open_gguf
from draftsmith.data.settings import check_not_negative, check_positive, comma_numbers
from draftsmith.data.store.files import write_json
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt, read_questions, task_sources
from draftsmith.eval.bootstrap import Resamples
from draftsmith.eval.engines.llamacpp import LlamaCppClient, ServedModels, ServerAnswer, server_words
from draftsmith.eval.settings import PromptChoice
from draftsmith.modules.types import InputError

PLAIN = "plain"
COLUMNS = [
    Column("setting", "setting"),
    Column("tokens_per_s", "tokens/s", ",.1f"),
    Column("speedup", "speed-up", ".2fx"),
    Column("speedup_ci", "95 % CI"),
    Column("tau", "tau", ".2f"),
    Column("first", "first kept", ".0%"),
    Column("equal", "= plain"),
]


@dataclass(frozen=True, kw_only=True)
class ServedConfig(PromptChoice):
    """Measure a drafter in llama.cpp's server, over draft lengths and thresholds, against the same server without it.

    All servers run at the same time and answer each prompt in turn, so that a busy machine slows them alike. Only
    generation counts, not the reading of the prompt.

    Attributes:
        target: The target's GGUF file, as it is served.
        draft: What `export --format llamacpp` wrote: a head's GGUF file or its directory, or a draft model's.
        prompts: As for `eval bench`. This or tasks.
        tasks: Directory of such files, each a task.
        limit: The first so many prompts of each file; 0 takes all.
        num_drafted: Draft lengths to measure (--spec-draft-n-max), separated by commas.
        p_min: Thresholds to measure with each (--spec-draft-p-min): a draft ends before a token of less probability.
        max_new_tokens: Longest answer.
        temperature: 0 is greedy, where answers are compared with the plain server's.
        threads: Threads of every server.
        engine_path: llama-server. Default: that of `make engines` in this directory, or one on the PATH.
        output: Directory that receives served.json.
    """

    target: Path
    draft: Path
    prompts: str | None = None
    tasks: str | None = None
    limit: int = 8
    num_drafted: str = "1,2,3,5"
    p_min: str = "0"
    max_new_tokens: int = 96
    temperature: float = 0.0
    threads: int = 1
    engine_path: Path | None = None
    output: Path

    def __post_init__(self) -> None:
        check_positive(self, "max_new_tokens", "threads")
        check_not_negative(self, "limit", "temperature")
        for length in self.lengths:
            if length < 1:
                raise InputError("num_drafted", length, "draft lengths of 1 or more", "Correct it.")

    @property
    def lengths(self) -> list[int]:
        return comma_numbers("num_drafted", self.num_drafted, int)

    @property
    def thresholds(self) -> list[float]:
        return comma_numbers("p_min", self.p_min, float)


@sole_writer()
def run(config: ServedConfig) -> int:
    """Measure, print the tables and write served.json.

    Raises:
        InputError: no GGUF files, no prompts, or a server that does not start or answer.
    """
    drafter = gguf_file(config.draft)
    if drafter is None or config.target.suffix != ".gguf" or not config.target.is_file():
        found = f"{config.target} and {config.draft}"
        raise InputError("draft", found, "two GGUF files", "Export the head with --format llamacpp.")
    kind = "draft-simple" if is_gguf_model(drafter) else "draft-eagle3"
    sources = task_sources(config.prompts, config.tasks)
    files = read_questions(sources, str(config.target), config.split, config.keep_tasks, config.limit, "first")
    prompts = [prompt for file in files for prompt in file]
    context = max(len(prompt.prompt_ids) for prompt in prompts) + config.max_new_tokens + max(config.lengths) + 2
    binary = server_binary(config.engine_path)
    settings: dict[str, list[str]] = {
        PLAIN: server_words(binary, ServedModels(config.target), context, threads=config.threads)
    }
    models = ServedModels(config.target, drafter, kind)
    for length in config.lengths:
        for p_min in config.thresholds:
            label = f"n-max={length}" + (f", p-min={p_min:g}" if p_min else "")
            settings[label] = server_words(binary, models, context, length, p_min, threads=config.threads)

    answers: dict[str, list[ServerAnswer]] = {label: [] for label in settings}
    with contextlib.ExitStack() as stack:
        clients = {}
        for label, words in settings.items():
            url = stack.enter_context(running(words, {}))
            clients[label] = LlamaCppClient(url, config.max_new_tokens, config.temperature)
        labels = list(clients)
        for number, prompt in enumerate(prompts):
            # Each setting is first, second, ... equally often.
            for label in labels[number % len(labels) :] + labels[: number % len(labels)]:
                answers[label].append(clients[label].complete(prompt.prompt_ids))
            log_note(f"answered {number + 1} of {len(prompts)} prompts")

    if not any(answer.rounds for label in labels[1:] for answer in answers[label]):
        raise InputError("draft", f"{drafter}, of which nothing was drafted", "a drafter", "Read the server's log.")
    rows = [summary(label, given, answers[PLAIN], prompts, config.temperature) for label, given in answers.items()]
    best = max(rows[1:], key=lambda row: row["speedup"])
    results = {"target": str(config.target), "types": tensor_types(config.target), "draft": str(drafter), "rows": rows}
    write_json(config.output / "served.json", results | {"config": _json(config)})
    title = f"{config.target.name} in llama.cpp, {len(prompts)} prompts, threads: {config.threads}"
    cells = [{**row, "speedup_ci": format_interval(row["speedup_ci95"])} for row in rows]
    print_table(Table("served", title, COLUMNS, cells))
    if len(rows[0]["tau_by_task"]) > 1:
        tasks = list(rows[0]["tau_by_task"])
        columns = [Column("setting", "setting"), *(Column(task, task, ".2f") for task in tasks)]
        print_table(
            Table("tasks", "Acceptance length by task", columns, [{**row, **row["tau_by_task"]} for row in rows])
        )
    low = (best["speedup_ci95"] or [0.0])[0]
    if low > 1:
        print_text(f"Serve with {best['setting']}: {best['speedup']:.2f}x.")
    else:
        print_text(
            f"Do not speculate here: the best setting, {best['setting']}, is {best['speedup']:.2f}x plain decoding."
        )
    return 0


def summary(
    label: str,
    answers: Sequence[ServerAnswer],
    plain: Sequence[ServerAnswer],
    prompts: Sequence[BenchPrompt],
    temperature: float,
) -> dict[str, Any]:
    """Return the row of one setting. Speed-up is the ratio of tokens per second of generation, paired by prompt."""
    resamples = Resamples(range(len(prompts)), seed=0)
    # The first token of an answer comes from reading the prompt.
    ours, theirs = ([len(answer.tokens) - 1 for answer in given] for given in (answers, plain))
    seconds, base = ([answer.generation_s for answer in given] for given in (answers, plain))
    ratio = (sum(ours) / sum(seconds)) / (sum(theirs) / sum(base))
    interval = resamples.interval(
        lambda: resamples.sums(ours) / resamples.sums(seconds) * resamples.sums(base) / resamples.sums(theirs)
    )
    # A round whose last drafted token ends the answer emits none of the target's own.
    calls = [
        max(len(answer.rounds), count - sum(one.accepted for one in answer.rounds))
        for answer, count in zip(answers, ours, strict=True)
    ]
    num_rounds = sum(len(answer.rounds) for answer in answers)

    def tau(chosen: Sequence[int]) -> float:
        return sum(ours[i] for i in chosen) / max(sum(calls[i] for i in chosen), 1)

    tasks = sorted({prompt.task for prompt in prompts})
    by_task = {task: [i for i, prompt in enumerate(prompts) if prompt.task == task] for task in tasks}
    differing = sum(one.tokens != other.tokens for one, other in zip(answers, plain, strict=True))
    equal = "-" if temperature else "yes" if not differing else f"no ({differing})"
    return {
        "setting": label,
        "tokens_per_s": sum(ours) / sum(seconds),
        "speedup": ratio,
        "speedup_ci95": None if label == PLAIN else interval,
        "tau": tau(range(len(prompts))),
        "tau_by_task": {task: tau(chosen) for task, chosen in by_task.items()},
        "first": sum(one.accepted > 0 for answer in answers for one in answer.rounds) / num_rounds
        if num_rounds
        else None,
        "equal": equal,
    }


def tensor_types(file: Path) -> dict[str, int]:
    """Return how many tensors of a GGUF file have each type."""
    names, counts = np.unique([tensor.tensor_type.name for tensor in open_gguf(file)[1].values()], return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}


def _json(config: ServedConfig) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(config).items()
    }

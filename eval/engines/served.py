"""`draftsmith eval served`: speed and acceptance length of a drafter in llama.cpp or vLLM, beside plain decoding."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from draftsmith.data.console import Column, Table, format_interval, log_note, print_table, print_text
from draftsmith.data.engines.llamacpp import server_binary
from draftsmith.data.engines.process import running
from draftsmith.data.settings import check_not_negative, check_positive, comma_numbers
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt, read_questions, task_sources
from draftsmith.eval.bootstrap import Resamples
from draftsmith.eval.engines.chain import SYSTEMS, EngineAnswer
from draftsmith.eval.engines.llamacpp import LlamaCppClient, Round, ServedModels, ServerAnswer, server_words
from draftsmith.eval.engines.vllm import ENVIRONMENT, VllmClient, engine_python
from draftsmith.eval.engines.vllm import server_words as server_words_vllm
from draftsmith.eval.settings import PromptChoice
from draftsmith.modules.formats import formats
from draftsmith.modules.formats.base import Served
from draftsmith.modules.formats.foreign import ForeignHead, causal_lm, detect
from draftsmith.modules.formats.systems import vllm_command
from draftsmith.modules.pretrained.directory import foreign_package, gguf_file, package_directory
from draftsmith.modules.pretrained.files import write_json
from draftsmith.modules.pretrained.gguf import open_gguf
from draftsmith.modules.pretrained.gguf_writer import is_gguf_model
from draftsmith.modules.pretrained.hub import model_directory
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
    """Measure a drafter in a server, over draft lengths and thresholds, against the same server without it.

    llama.cpp's servers run at the same time and answer each prompt in turn, so that a busy machine slows them alike;
    vLLM's, which take the whole memory of a GPU, one after another. Only generation counts, not the reading of the
    prompt.

    Attributes:
        engine: The server, which is started here.
        target: The target as it is served: for llama.cpp its GGUF file, for vLLM a directory or hub id.
        draft: What `export --format llamacpp` (a GGUF file or its directory) or `--format vllm` wrote, or a draft
            model.
        prompts: As for `eval bench`. This or tasks.
        tasks: Directory of such files, each a task.
        limit: The first so many prompts of each file; 0 takes all.
        num_drafted: Draft lengths to measure (--spec-draft-n-max), separated by commas.
        p_min: llama.cpp's thresholds to measure with each (--spec-draft-p-min): a draft ends before a token of less
            probability.
        max_new_tokens: Longest answer.
        temperature: 0 is greedy, where answers are compared with the plain server's.
        threads: Threads of every server.
        engine_path: llama-server, or the Python of an environment with vLLM. Default: that of `make engines` in this
            directory, or llama-server on the PATH, or this Python.
        output: Directory that receives served.json.
    """

    engine: Literal["llamacpp", "vllm"] = "llamacpp"
    target: str
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
        if self.engine == "vllm" and any(self.thresholds):
            raise InputError("p_min", self.p_min, "none: vLLM ends no draft early", "Leave it out.")

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
    sources = task_sources(config.prompts, config.tasks)
    files = read_questions(sources, str(config.target), config.split, config.keep_tasks, config.limit, "first")
    prompts = [prompt for file in files for prompt in file]
    answers = (ask_vllm if config.engine == "vllm" else ask_llamacpp)(config, prompts)
    if not any(answer.rounds for label in answers if label != PLAIN for answer in answers[label]):
        found = f"{config.draft}, of which nothing was drafted"
        raise InputError("draft", found, "a drafter", "Read the server's log.")
    rows = [summary(label, given, answers[PLAIN], prompts, config.temperature) for label, given in answers.items()]
    best = max(rows[1:], key=lambda row: row["speedup"])
    results: dict[str, Any] = {"target": str(config.target), "draft": str(config.draft), "rows": rows}
    if config.engine == "llamacpp":
        results["types"] = tensor_types(Path(config.target))
    write_json(config.output / "served.json", results | {"config": _json(config)})
    title = f"{Path(config.target).name} in {SYSTEMS[config.engine]}, {len(prompts)} prompts, threads: {config.threads}"
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


def ask_llamacpp(config: ServedConfig, prompts: Sequence[BenchPrompt]) -> dict[str, list[ServerAnswer]]:
    """Answer all prompts with servers of every setting, in turn."""
    drafter, target = gguf_file(config.draft), Path(config.target)
    if drafter is None or target.suffix != ".gguf" or not target.is_file():
        found = f"{target} and {config.draft}"
        raise InputError("draft", found, "two GGUF files", "Export the head with --format llamacpp.")
    kind = "simple" if is_gguf_model(drafter) else detect(ForeignHead.of(foreign_package(drafter))).kind
    context = max(len(prompt.prompt_ids) for prompt in prompts) + config.max_new_tokens + max(config.lengths) + 2
    binary = server_binary(config.engine_path)
    settings: dict[str, list[str]] = {
        PLAIN: server_words(binary, ServedModels(target), context, threads=config.threads)
    }
    models = ServedModels(target, drafter, f"draft-{kind}")
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
    return answers


def ask_vllm(config: ServedConfig, prompts: Sequence[BenchPrompt]) -> dict[str, list[ServerAnswer]]:
    """Answer all prompts with the server of one setting after another."""
    python = engine_python(config.engine_path)
    package = foreign_package(config.draft)
    foreign = ForeignHead.of(package)
    kind = "" if causal_lm(foreign) else detect(foreign).kind
    if kind and ("vllm", kind) not in formats():
        raise InputError("draft", f"a head of kind {kind}", "one that vLLM serves", "Export it with --format vllm.")
    target = str(model_directory(config.target).absolute())
    directory = str(package_directory(str(config.draft)).absolute())
    context = max(len(prompt.prompt_ids) for prompt in prompts) + config.max_new_tokens + 2 * max(config.lengths) + 2
    # On a CPU vLLM compiles for minutes.
    eager = not torch.cuda.is_available()
    answers: dict[str, list[ServerAnswer]] = {}
    for length in (0, *config.lengths):
        served = Served(target, directory, length)
        printed = vllm_command(kind or "draft_model", served)
        printed = printed if length else f"vllm serve {shlex.quote(target)}"
        words = server_words_vllm(python, printed, "auto", context, eager)
        label = f"num_speculative_tokens={length}" if length else PLAIN
        with running(words, {**ENVIRONMENT, "OMP_NUM_THREADS": str(config.threads)}) as url:
            client = VllmClient(url, config.target, config.max_new_tokens, config.temperature)
            client.answer(0, prompts[0].prompt_ids)  # a first answer pays for what is made once
            replies = [client.answer(number, prompt.prompt_ids) for number, prompt in enumerate(prompts)]
        log_note(f"answered {len(prompts)} prompts: {label}")
        answers[label] = [as_rounds(reply, length) for reply in replies]
    return answers


def as_rounds(reply: EngineAnswer, length: int) -> ServerAnswer:
    """Return a reply with as many rounds of each number of accepted tokens as its counts by place say."""
    reached = (*reply.counts, 0)
    rounds = [
        Round(length, place) for place in range(len(reached) - 1) for _ in range(reached[place] - reached[place + 1])
    ]
    return ServerAnswer(reply.tokens, tuple(rounds), 0.0, reply.generation_s)


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
    ours, theirs = ([answer.num_tokens - 1 for answer in given] for given in (answers, plain))
    seconds, base = ([answer.generation_s for answer in given] for given in (answers, plain))
    if 0 in (sum(seconds), sum(base), sum(theirs)):
        raise InputError("prompts", "answers of one token each", "longer ones, to time", "Choose other prompts.")
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

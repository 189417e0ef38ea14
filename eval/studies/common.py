"""What studies share: settings, models and prompts, rollouts, benches below the study's directory, and results.json.

A study finds numbers and writes them down as tables; `eval/report/study_charts.py` draws those that are charts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from draftsmith.data.console import Table, format_interval, json_values, log_note, print_table, progress_bar
from draftsmith.data.heads.directory import load_head
from draftsmith.data.models.loading import check_device, load_lm
from draftsmith.data.settings import DraftSettings, comma_numbers
from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.manifest import resolved
from draftsmith.data.store.reading import read_object
from draftsmith.eval.bench.command import BenchConfig, bench
from draftsmith.eval.bench.load import check_methods, load_models
from draftsmith.eval.bench.prompts import BenchPrompt, longest_sequence, read_prompts
from draftsmith.eval.bench.results import RESULTS, describe
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.eval.replay.chains import ChainRecorder
from draftsmith.eval.replay.record import Recording, TargetAnswers
from draftsmith.eval.replay.rollouts import ChainRollouts, recorded
from draftsmith.eval.report.tables import to_json
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.loop import Generation, Round
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.drafters.methods import Models, parse_methods
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams, at_least


@dataclass(frozen=True, kw_only=True)
class StudyConfig(DraftSettings, PromptChoice, AnswerLength, Running):
    """Settings of every study of decoding methods.

    Attributes:
        target: model directory, hub id or embedded:target.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts.
        mid: model between draft and target.
        limit: study the first so many prompts; 0 takes all.
        temperatures: separated by commas; 0 is greedy.
        repeats: runs of every measured method on every prompt; the median counts.
        quick: fewer prompts, repeats and settings than the others say: a first look in under two minutes.
        output: directory that receives results.json, and the runs of `eval bench` that it rests on.
    """

    target: str
    prompts: str
    mid: str | None = None
    limit: int = 16
    max_new_tokens: int = 256
    temperatures: str = "0,1"
    repeats: int = 2
    quick: bool = False
    output: Path

    @property
    def sampling(self) -> list[SamplingParams]:
        """One for each temperature, in the order given."""
        return [SamplingParams(value) for value in comma_numbers("temperatures", self.temperatures, float)]


@dataclass(frozen=True)
class StudyContext:
    """What a study decodes with, loaded once. prompts: those that a bench of the same settings measures."""

    models: Models
    prompts: list[BenchPrompt]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, and the drafts before them."""
        return self.models.ends


def reduced(config: Any, most: Mapping[str, int], instead: Mapping[str, Any]) -> Any:
    """The settings of `--quick`. most: numbers that are lowered to these (0, all of them, too). instead: settings
    that are replaced."""
    lowered = {name: min(getattr(config, name) or cap, cap) for name, cap in most.items()}
    return dataclasses.replace(config, **lowered, **instead)


def prepare(config: StudyConfig, methods: Sequence[str], further: Sequence[BenchPrompt] = ()) -> StudyContext:
    """Check the settings, load the models that the methods need, and read the prompts.

    further: other prompts that are to be answered.

    Raises:
        InputError: whatever the user named wrong.
    """
    for field in ("repeats", "num_threads", "max_new_tokens"):
        at_least(field, getattr(config, field), 1)
    at_least("limit", config.limit, 0)
    params = config.sampling[0]
    labels = list(dict.fromkeys(methods))
    check_methods(parse_methods(",".join(labels)), config.paths)
    check_device(config.device)
    torch.set_num_threads(config.num_threads)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    models = load_study_models(config, config.paths, labels, params, [*prompts, *further])
    return StudyContext(dataclasses.replace(models, ends=() if config.ignore_eos else models.ends), prompts)


def load_study_models(
    config: Any,
    paths: Mapping[str, str],
    methods: Sequence[str],
    params: SamplingParams,
    prompts: Sequence[BenchPrompt],
) -> Models:
    """The models that these methods need, with room for these prompts and their answers.

    config: has target, max_new_tokens and how models are loaded. paths: flag -> the model that the user named.

    Raises:
        InputError: a missing or unfitting model or head, or a prompt that does not fit.
    """
    target = load_lm(config.target, **config.loading)
    longest = longest_sequence(prompts, config.max_new_tokens, target.info.max_position)
    named = parse_methods(",".join(methods))
    return load_models(named, paths, longest, params, target, config.draft_precision, **config.loading)


def head_directories(root: Path) -> dict[str, Path]:
    """Name -> head directory, of every folder in `root` that is a head or a training's output (its best/).

    Raises:
        InputError: there is none.
    """
    found: dict[str, Path] = {}
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        directory = next((place for place in (folder, folder / "best") if (place / "config.json").exists()), None)
        if directory is not None:
            found[folder.name] = directory
    if not found:
        expected = "a folder of acceptance heads or of trainings' outputs"
        raise InputError("heads", f"no head in {root}", expected, "Check the path, or leave --heads out to train some.")
    return found


def load_heads(
    directories: Mapping[str, Path], draft: CausalLM, identity: Mapping[str, str] | None = None
) -> dict[str, AcceptanceHead]:
    """Name -> acceptance head, each of which must have been trained for this draft; arguments as of `load_head`.

    Raises:
        InputError: one was trained for another.
    """
    loaded = {}
    for name, directory in directories.items():
        head = load_head(directory, draft, kind="acceptance", identity=identity)
        assert isinstance(head, AcceptanceHead)
        loaded[name] = head
    return loaded


def decode_prompts(
    config: StudyConfig,
    context: StudyContext,
    label: str,
    params: SamplingParams,
    on_round: Callable[[BenchPrompt, Round], None],
    drafter: Drafter | None = None,
) -> list[Generation]:
    """Answer every prompt with one method, off the clock; `on_round` sees every round of every prompt.

    drafter: the method's own, where the caller has built it to watch it.
    """
    drafter = drafter or parse_methods(label)[0].method.build(context.models)
    made: list[Generation] = []
    with progress_bar(f"{label}, T={params.temperature:g}", len(context.prompts), "prompts") as advance:
        for number, prompt in enumerate(context.prompts):

            def seen(done: Round, prompt: BenchPrompt = prompt) -> None:
                on_round(prompt, done)

            runner = EngineRunner(context.models.target, drafter, params, context.eos_ids, seen)
            made += runner([prompt.prompt_ids], config.max_new_tokens, [config.seed + number])
            advance(1)
    return made


def recorded_chains(
    directory: Path,
    models: Models,
    drafter: str,
    prompts: Sequence[BenchPrompt],
    how: Recording,
    heads: Mapping[str, AcceptanceHead],
    further: Literal["", "along", "together"] = "",
    answers: TargetAnswers | None = None,
) -> ChainRollouts:
    """Chains of every prompt with the logits of all heads: those in `directory` are read, the others recorded there.

    further: along, the target reads the drafts too; together, rounds are drafted side by side as well.
    answers: of the target, where another drafter's are to be used again.

    Raises:
        InputError: the directory holds rollouts that were made otherwise.
    """
    settings: dict[str, Any] = {
        **dataclasses.asdict(how),
        "drafter": drafter,
        "models": {flag: lm.info.identity for flag, lm in (("target", models.target), ("draft", models.draft)) if lm},
        "heads": {name: head_digest(head) for name, head in heads.items()},
    }
    if models.ends:
        settings["ends"] = list(models.ends)
    if further:
        settings[further] = True
    if drafter != "draft":
        settings["models"][drafter] = head_digest(models.heads[drafter])
    together = further == "together"
    recorder = ChainRecorder(models, drafter, how, heads, answers, along=bool(further), side_by_side=together)
    with progress_bar(f"rollouts, {directory.name}", len(prompts), "prompts") as advance:
        return recorded(directory, prompts, settings, recorder, advance)


def head_digest(head: nn.Module) -> str:
    """Hash of a head's weights."""
    values = hashlib.sha256()
    for tensor in head.parameters():
        values.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return values.hexdigest()[:16]


def measured(
    config: StudyConfig, methods: Sequence[str], params: SamplingParams, name: str = "bench", **instead: Any
) -> dict[str, dict[str, Any]]:
    """Label -> row of a bench at one temperature, in a directory of its own below the study's.

    instead: settings of the bench that are not the study's. All methods are in one run: that is what interleaves them.
    What an earlier start of the same study has measured to its end is not measured again, until the study is complete.
    """
    shared = {field.name for field in dataclasses.fields(BenchConfig)} & {f.name for f in dataclasses.fields(config)}
    settings = {name: getattr(config, name) for name in shared - {"output", "temperatures"}} | instead
    to_measure = BenchConfig(
        **settings,
        methods=",".join(methods),
        turns="last",  # as `read_prompts` reads them
        temperature=params.temperature,
        output=bench_directory(config, params, name),
    )
    path, results = to_measure.output / RESULTS, None
    if path.exists() and not (config.output / RESULTS).exists():
        results = read_object(path, {"meta": {"settings": dict}, "methods": [dict]})
        if results["meta"]["settings"] == resolved(to_measure):
            log_note(f"Measured before: {path}")
        else:
            results = None
    return {row["method"]: row for row in (results or bench(to_measure))["methods"]}


def bench_directory(config: StudyConfig, params: SamplingParams, name: str = "bench") -> Path:
    """Directory in which `measured` keeps a run."""
    return config.output / f"{name}-t{params.temperature:g}"


def write_results(
    kind: str,
    config: Any,
    context: StudyContext,
    tables: Sequence[Table],
    summary: Mapping[str, Any],
    shown: Sequence[str] | None = None,
    **more: Any,
) -> Path:
    """Write `output`/results.json, last of all: it is there only when the study is complete; and print its tables.

    config: has prompts and output. summary: flat numbers that texts quote. shown: names of the tables to print, None
    for all that have headings. more: what else belongs into `meta`.
    """
    models = context.models
    smaller = {"draft": models.draft, "mid": models.mid}
    results = {
        "meta": describe(kind, config, models.target, context.prompts, config.prompts, smaller, **more),
        "tables": to_json(tables),
        "summary": json_values(summary),
    }
    make_directory(config.output)
    write_json(config.output / RESULTS, results)
    for table in tables:
        if table.columns and (shown is None or table.name in shown):
            print_table(table)
    log_note(f"Written to {config.output / RESULTS}")
    return Path(config.output)


def mean(values: Sequence[float]) -> float | None:
    """Mean of the values; None where there are none."""
    return float(np.mean(values)) if len(values) else None


def mode(temperature: float) -> str:
    """How tables and charts name a temperature."""
    return f"T={temperature:g}"


def slug(*parts: str) -> str:
    """A key of the summary: `pre+self-verify`, `T=1` -> `pre_self_verify_t1`."""
    text = "_".join(parts).lower().replace("=", "").replace(",", "")
    return "".join(char if char.isalnum() or char == "." else "_" for char in text)


def speed_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Mode, speed-up with its interval, as ends and as text, and tau of a measured method."""
    low, high = row["speedup_ci95"] or (None, None)
    ends = {"low": low, "high": high, "ci": format_interval(row["speedup_ci95"])}
    return {"mode": row["mode"], "speedup": row["speedup"], **ends, "tau": row["tau"]}


def summarised(rows: Iterable[Mapping[str, Any]], keys: Sequence[str], by: Sequence[str]) -> dict[str, Any]:
    """Numbers of a table for the summary: each of these keys of every row, named by what the row is of."""
    return {f"{key}_{slug(*(str(row[name]) for name in by))}": row[key] for row in rows for key in keys}

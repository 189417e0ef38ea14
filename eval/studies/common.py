"""What studies share: settings, models and prompts, and benches below the study's directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.data.heads.draft_settings import DraftSettings
from draftsmith.data.models.device import check_device
from draftsmith.data.models.loading import load_lm
from draftsmith.data.progress import bar, say
from draftsmith.data.prompts import numbers
from draftsmith.data.store.manifest import resolved
from draftsmith.data.store.reading import read_object
from draftsmith.eval.bench.command import BenchConfig, bench
from draftsmith.eval.bench.load import check_methods, load_models
from draftsmith.eval.bench.prompts import BenchPrompt, longest_sequence, read_prompts
from draftsmith.eval.bench.results import RESULTS
from draftsmith.eval.bench.runner import EngineRunner
from draftsmith.eval.report.figures import Figure
from draftsmith.eval.settings import Answers, ChosenPrompts, TimedDecoding
from draftsmith.eval.studies.keeping import keep
from draftsmith.modules.decoding.loop import Generation, Round
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.drafters.methods import Models, parse_methods
from draftsmith.modules.types import SamplingParams, at_least


@dataclass(frozen=True, kw_only=True)
class StudyConfig(DraftSettings, ChosenPrompts, Answers, TimedDecoding):
    """Settings of every study of decoding methods.

    Attributes:
        target: model directory, hub id or embedded:target.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts.
        mid: model between draft and target.
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
        return [SamplingParams(value) for value in numbers("temperatures", self.temperatures, float)]


@dataclass(frozen=True)
class Ground:
    """What a study decodes with, loaded once. prompts: those that a bench of the same settings measures."""

    models: Models
    prompts: list[BenchPrompt]
    eos_ids: tuple[int, ...]


def reduced(config: Any, most: Mapping[str, int], instead: Mapping[str, Any]) -> Any:
    """The settings of `--quick`. most: numbers that are lowered to these (0, all of them, too). instead: settings
    that are replaced."""
    lowered = {name: min(getattr(config, name) or cap, cap) for name, cap in most.items()}
    return dataclasses.replace(config, **lowered, **instead)


def prepare(config: StudyConfig, methods: Sequence[str], further: Sequence[BenchPrompt] = ()) -> Ground:
    """Check the settings, load the models that the methods need, and read the prompts.

    further: other prompts that are to be answered.

    Raises:
        InputError: whatever the user named wrong.
    """
    for field in ("repeats", "num_threads", "max_new_tokens"):
        at_least(field, getattr(config, field), 1)
    at_least("limit", config.limit, 0)
    params = config.sampling[0]
    named = parse_methods(",".join(dict.fromkeys(methods)))
    check_methods(named, config.paths)
    check_device(config.device)
    torch.set_num_threads(config.num_threads)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    target = load_lm(config.target, **config.loading)
    longest = longest_sequence([*prompts, *further], config.max_new_tokens, target.info.max_position)
    models = load_models(named, config.paths, longest, params, target, **config.loading)
    ends = () if config.ignore_eos else tuple(target.info.eos_ids)
    return Ground(dataclasses.replace(models, ends=ends), prompts, ends)


def decode(
    config: StudyConfig,
    ground: Ground,
    label: str,
    params: SamplingParams,
    on_round: Callable[[BenchPrompt, Round], None],
    drafter: Drafter | None = None,
) -> list[Generation]:
    """Answer every prompt with one method, off the clock; `on_round` sees every round of every prompt.

    drafter: the method's own, where the caller has built it to watch it.
    """
    drafter = drafter or parse_methods(label)[0].method.build(ground.models)
    made: list[Generation] = []
    with bar(f"{label}, T={params.temperature:g}", len(ground.prompts), "prompts") as advance:
        for number, prompt in enumerate(ground.prompts):

            def seen(done: Round, prompt: BenchPrompt = prompt) -> None:
                on_round(prompt, done)

            runner = EngineRunner(ground.models.target, drafter, params, ground.eos_ids, seen)
            made += runner([prompt.prompt_ids], config.max_new_tokens, [config.seed + number])
            advance(1)
    return made


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
    results = measured_before(config, to_measure) or bench(to_measure)
    return {row["method"]: row for row in results["methods"]}


def bench_directory(config: StudyConfig, params: SamplingParams, name: str = "bench") -> Path:
    """Where `measured` keeps a run."""
    return config.output / f"{name}-t{params.temperature:g}"


def measured_before(study: StudyConfig, config: BenchConfig) -> dict[str, Any] | None:
    """The bench's results, where it was finished with these settings and the study was not."""
    path = config.output / RESULTS
    if (study.output / RESULTS).exists() or not path.exists():
        return None
    results = read_object(path, {"meta": {"settings": dict}, "methods": [dict]})
    if results["meta"]["settings"] != resolved(config):
        return None
    say(f"Measured before: {path}")
    return results


def write_results(
    config: StudyConfig, kind: str, ground: Ground, figures: Sequence[Figure], summary: Mapping[str, Any], **more: Any
) -> Path:
    """Print all tables and write results.json; arguments as of `keep`."""
    keep(kind, config, ground.models, ground.prompts, figures, summary, **more)
    return config.output


def mean(values: Sequence[float]) -> float | None:
    """None where there is nothing to average."""
    return float(np.mean(values)) if len(values) else None


def ci(interval: Sequence[float] | None) -> str:
    """As tables write it."""
    return f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else ""


def mode(temperature: float) -> str:
    """How tables and charts name a temperature."""
    return f"T={temperature:g}"


def slug(*parts: str) -> str:
    """A key of the summary: `pre+self-verify`, `T=1` -> `pre_self_verify_t1`."""
    text = "_".join(parts).lower().replace("=", "").replace(",", "")
    return "".join(char if char.isalnum() or char == "." else "_" for char in text)

"""Settings, models, benches and results shared by the papers' scripts."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.data.console import Table, format_interval, log_note, print_table, progress_bar, tables_to_json
from draftsmith.data.settings import comma_numbers
from draftsmith.eval.bench.command import BenchConfig, bench
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.bench.results import Resamples, read_rows
from draftsmith.eval.bench.runner import EngineRunner, load_run
from draftsmith.eval.meta import RESULTS, describe
from draftsmith.eval.settings import AnswerLength, DraftSettings, PromptChoice, Running
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.loop import Generation, Round
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import parse_methods
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.heads import load_head
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams, check_range

Row = Mapping[str, Any]
Floats = NDArray[np.float64]
# Completions loop at the size of the shipped models and would flatter every drafter: they are left out.
EMBEDDED_TASKS = (
    "rename,add_docstring,remove_docstring,add_type_hints,remove_type_hints,wrap_in_try,sort_imports,explain"
)


@dataclass(frozen=True, kw_only=True)
class PaperConfig(DraftSettings, PromptChoice, AnswerLength, Running):
    """Settings shared by the papers' scripts.

    Attributes:
        target: Model directory, hub id or embedded:target.
        data: JSONL, JSON or Parquet file of chats, a prompts artifact, a data set, or embedded:prompts.
        mid: Model between draft and target.
        limit: Number of prompts; 0 takes all.
        temperatures: Separated by commas; 0 is greedy.
        repeats: Runs of every measured method on every prompt; the median counts.
        output: Directory that receives results.json and the runs of `eval bench`.
    """

    target: str = "embedded:target"
    data: str = "embedded:prompts"
    split: str | None = "test"
    tasks: str | None = EMBEDDED_TASKS
    mid: str | None = None
    limit: int = 12
    max_new_tokens: int = 256
    temperatures: str = "0,1"
    repeats: int = 1
    output: Path = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("repeats", "num_threads", "max_new_tokens"):
            check_range(name, getattr(self, name), 1)
        check_range("limit", self.limit, 0)
        _ = self.chosen_device, self.modes

    @property
    def modes(self) -> list[SamplingParams]:
        """Sampling at each temperature."""
        return [SamplingParams(value) for value in comma_numbers("temperatures", self.temperatures, float)]


@dataclass(frozen=True)
class Loaded:
    """Models of a script, and the prompts that a bench with the same settings measures."""

    models: Models
    prompts: list[BenchPrompt]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a response, and the drafts before them."""
        return self.models.ends


def load(config: PaperConfig, methods: Iterable[str], further: Sequence[BenchPrompt] = ()) -> Loaded:
    """Load the models that the methods need, and read the prompts.

    further: other prompts that models need room for.
    """
    named = parse_methods(",".join(dict.fromkeys(methods)))
    target = Checkpoint(config.target)
    prompts = read_prompts(config.data, target, config.split, config.tasks, config.limit)
    return Loaded(load_run(config, target, named, [*prompts, *further], config.modes), prompts)


def head_directories(root: Path) -> dict[str, Path]:
    """Return name -> head directory for every folder in `root` that is a head or a training's output."""
    directories: dict[str, Path] = {}
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        place = next((place for place in (folder, folder / "best") if (place / "config.json").exists()), None)
        if place is not None:
            directories[folder.name] = place
    if not directories:
        expected = "a folder of acceptance heads or of trainings' outputs"
        raise InputError("heads", f"no head in {root}", expected, "Check the path.")
    return directories


def load_heads(directories: Mapping[str, Path], draft: CausalLM) -> dict[str, AcceptanceHead]:
    """Load acceptance heads, each of which must have been trained for this draft model."""
    heads = {}
    for name, directory in directories.items():
        head = load_head(directory, draft, kind="acceptance")
        assert isinstance(head, AcceptanceHead)
        heads[name] = head
    return heads


def decode_prompts(
    config: PaperConfig,
    loaded: Loaded,
    label: str,
    params: SamplingParams,
    on_round: Callable[[BenchPrompt, Round], None],
    drafter: Drafter | None = None,
) -> list[Generation]:
    """Decode every prompt with one method, off the clock, and pass every round to `on_round`.

    drafter: built by the caller, who watches it.
    """
    drafter = drafter or parse_methods(label)[0].method.build(loaded.models)
    generations: list[Generation] = []
    with progress_bar(f"{label}, T={params.temperature:g}", len(loaded.prompts), "prompts") as advance:
        for number, prompt in enumerate(loaded.prompts):

            def see(done: Round, prompt: BenchPrompt = prompt) -> None:
                on_round(prompt, done)

            runner = EngineRunner(loaded.models.target, drafter, params, loaded.eos_ids, see)
            generations.append(runner(prompt.prompt_ids, config.max_new_tokens, config.seed + number))
            advance(1)
    return generations


def measure(
    config: PaperConfig, methods: Sequence[str], params: SamplingParams, name: str = "bench", **changes: Any
) -> dict[str, dict[str, Any]]:
    """Return label -> row of a bench at one temperature, written to OUTPUT/NAME-tT.

    All methods are in one run, which interleaves them; a finished one of the same settings is read. changes: settings
    of the bench that differ from the script's.
    """
    shared = {item.name for item in dataclasses.fields(BenchConfig)} & {f.name for f in dataclasses.fields(config)}
    settings = {name: getattr(config, name) for name in shared - {"output", "temperatures"}} | changes
    bench_config = BenchConfig(
        **settings,
        methods=",".join(methods),
        turns="last",  # as `read_prompts` reads them
        temperature=str(params.temperature),
        output=bench_directory(config, params, name),
    )
    return {row["method"]: row for row in bench(bench_config)["methods"]}


def bench_directory(config: PaperConfig, params: SamplingParams, name: str = "bench") -> Path:
    return config.output / f"{name}-t{params.temperature:g}"


def bench_rows(directory: Path) -> list[Row]:
    """Return a bench's rows per prompt, without prompts that could not be measured."""
    return [row for row in read_rows(directory) if row["error"] is None]


def write_results(kind: str, config: Any, loaded: Loaded, tables: Sequence[Table]) -> Path:
    """Write results.json last, and print the tables."""
    models = loaded.models
    smaller = {"draft": models.draft, "mid": models.mid}
    identities = {role: lm.info.identity for role, lm in smaller.items() if lm is not None}
    meta = describe(kind, config, loaded.prompts, config.data, target=models.target.info.identity, models=identities)
    meta["command"] = shlex.join(["python", *sys.argv])
    make_directory(config.output)
    write_json(config.output / RESULTS, {"meta": meta, "tables": tables_to_json(tables)})
    for table in tables:
        if table.columns:
            print_table(table)
    log_note(f"Written to {config.output / RESULTS}")
    return Path(config.output)


def mode_name(params: SamplingParams) -> str:
    return f"T={params.temperature:g}"


def speed_columns(row: Row) -> dict[str, Any]:
    """Return mode, speed-up with its interval, and tau of a measured method."""
    low, high = row["speedup_ci95"] or (None, None)
    ends = {"low": low, "high": high, "ci": format_interval(row["speedup_ci95"])}
    return {"mode": row["mode"], "speedup": row["speedup"], **ends, "tau": row["tau"]}


def ratio_interval(pairs: Floats, base: Floats, seed: int) -> list[float] | None:
    """Return the 95 % interval of (tokens/s of `pairs`) / (tokens/s of `base`) - 1; None for fewer than two prompts.

    pairs, base [prompts, 2]: tokens and seconds of the same prompts, which are resampled together.
    """
    drawn = Resamples(range(len(pairs)), seed)

    def speed(values: Floats) -> Floats:
        return drawn.sums(values[:, 0]) / drawn.sums(values[:, 1])

    return drawn.interval(speed(pairs) / speed(base) - 1)


def rate(pairs: Floats) -> float:
    """Return tokens per second of pairs [prompts, 2]: a ratio of sums."""
    tokens, seconds = pairs.sum(0)
    return float(tokens / seconds)


def bench_gain(rows: Sequence[Row], method: str, base: str, clock: str, seed: int) -> tuple[float, list[float] | None]:
    """Return the gain in tokens/s of `method` over `base` in a bench, with its interval. clock: `cpu` or `wall`."""
    by_id = [
        {row["id"]: (row["tokens"], row[f"{clock}_s"]) for row in rows if row["method"] == name}
        for name in (method, base)
    ]
    ids = [name for name in by_id[0] if name in by_id[1]]
    own, other = (np.array([pair[name] for name in ids], np.float64).reshape(-1, 2) for pair in by_id)
    return rate(own) / rate(other) - 1, ratio_interval(own, other, seed)


def mean_interval(values: Sequence[float], owners: Sequence[Any], seed: int) -> tuple[float, float] | tuple[None, None]:
    """Return the ends of the 95 % interval of the mean of values [N]; None for fewer than two owners."""
    resamples = Resamples(owners, seed)
    interval = resamples.interval(resamples.sums(values) / resamples.sums(np.ones(len(values))))
    return (interval[0], interval[1]) if interval else (None, None)

"""`draftsmith eval bench`: methods measured against each other, prompt by prompt on the same machine."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftsmith.data.manifest import publish, write_json
from draftsmith.data.measured import CARD
from draftsmith.data.models import load_lm
from draftsmith.data.progress import say
from draftsmith.eval.cards import check_cards, write_cards
from draftsmith.eval.hf_baseline import HFRunner, load_hf_model
from draftsmith.eval.load import LOADING, load_models
from draftsmith.eval.measure import BatchRunner, BenchPrompt, EngineRunner, GroupRunner, OneByOne, Runner, measure
from draftsmith.eval.methods import METHODS, check_needs, parse_methods
from draftsmith.eval.methods.base import Method, Models, Named, at_least, rows_lm
from draftsmith.eval.methods.hf import HFAssisted, HFGenerate
from draftsmith.eval.prompts import read_prompts
from draftsmith.eval.provenance import describe
from draftsmith.eval.summary import BASELINE, Clock, prompt_rows, summarise
from draftsmith.eval.tables import results_table, task_table
from draftsmith.eval.trace import TracedRunner, TraceFile
from draftsmith.modules.targets.base import RowsSession, Session
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams

RESULTS, PER_PROMPT = "results.json", "prompts.jsonl"


@dataclass(frozen=True)
class BenchConfig:
    """Measures decoding methods against this engine's own autoregressive decoding.

    target: model directory, hub id or embedded:target.
    prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts.
    draft: draft model, for spec, specdec++, confidence, self-verify and hf-assisted; M1 of three-model methods.
    mid: model between draft and target, M2 of pre-verify, pre+self-verify and hsddw.
    eagle: EAGLE head directory, for eagle, eagle-tree and eagle2; with drafter=eagle in place of a draft model.
    acceptance: acceptance head directory, for specdec++; trained for the draft.
    methods: name:setting=value, separated by commas; ar is always measured. One model: ar, pld:k=10:ngram=3,
        lookahead:w=15:n=5:g=15, hf. With a draft: spec:k=5, specdec++:h=0.7:min=2:max=20:calibrated=off,
        confidence:t=0.4:min=1:max=20, self-verify:k=10, pearl:k=5, hf-assisted:k=5:t=0. With an EAGLE head:
        eagle:k=5, eagle-tree:tree=eagle-1, eagle2:nodes=60:depth=6:topk=10:value=on:rerank=on, and specdec++,
        confidence or self-verify with drafter=eagle. Three models: pre-verify:k=10, pre+self-verify:k=10,
        hsddw:k=10:max=20, each with drafter=eagle where the head was trained for --mid.
    method: one more method, as the decode.yaml of `draftsmith eval tune` names it.
    split: keep prompts of this split (train, dev or test of embedded:prompts).
    tasks: keep prompts of these tasks, separated by commas.
    limit: measure the first so many prompts; 0 takes all.
    max_new_tokens: longest answer.
    ignore_eos: go on after the end token, up to max_new_tokens.
    temperature: 0 is greedy.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the most probable tokens of this mass; 1 keeps all.
    dtype: float32, bfloat16, float16 or auto. Equality with ar is checked in float32 only.
    device: cpu, cuda, cuda:1, ...
    engine: lean (Llama family), hf (any transformers model), or auto.
    packed: on a CPU, hold large weights in the layout of its kernels (lean engine).
    num_threads: CPU threads. With one, CPU time is the clock; it does not see other programs.
    batch_size: prompts that are answered and timed together, by ar and the methods that draft chains; speed-ups are
        over ar at the same batch size.
    seed: of sampling and of the bootstrap.
    repeats: runs of every method on every prompt; the median counts.
    trust_remote_code: run code that comes with a model.
    trace: JSON-lines file that receives a line for every round of each prompt's first run.
    card: write what was measured into the directories of the heads that were used, and into their model cards.
    output: directory that receives results.json and prompts.jsonl.
    """

    target: str
    prompts: str
    draft: str | None = None
    mid: str | None = None
    eagle: str | None = None
    acceptance: str | None = None
    methods: str = "ar"
    method: str | None = None
    split: str | None = None
    tasks: str | None = None
    limit: int = 0
    max_new_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    device: str = "cpu"
    engine: Literal["auto", "lean", "hf"] = "auto"
    packed: bool = True
    num_threads: int = 1
    batch_size: int = 1
    seed: int = 0
    repeats: int = 3
    trust_remote_code: bool = False
    trace: Path | None = None
    card: bool = False
    output: Path = Path("runs/bench")

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p)

    @property
    def clock(self) -> Clock:
        """One CPU thread: its own time, which a busy machine does not falsify. Else the wall's."""
        return "cpu" if torch.device(self.device).type == "cpu" and self.num_threads == 1 else "wall"


def run(config: BenchConfig) -> Path:
    """Measure, print the table and write `output`/results.json, which is there only when the run is complete."""
    results = bench(config)
    console = Console(highlight=False)
    console.print(results_table(results))
    by_task = task_table(results)
    if by_task is not None and by_task.row_count > 1:
        console.print(by_task)
    say(f"Written to {config.output / RESULTS}")
    return config.output


def bench(config: BenchConfig) -> dict[str, Any]:
    """What results.json holds: {"meta": ..., "methods": [...]}. Writes it too."""
    named = with_baseline(parse_methods(asked_for(config)))
    params = check(config, named)
    torch.set_num_threads(config.num_threads)
    # One prompt more than is measured, where there is one, is the warm-up; else the first is run once more for it.
    wanted = config.limit + 1 if config.limit else 0
    prompts = read_prompts(config.prompts, config.target, config.split, config.tasks, wanted)
    prompts, warm_up = (prompts[:-1], prompts[-1]) if len(prompts) == wanted else (prompts, prompts[0])
    how = {name: getattr(config, name) for name in LOADING}
    target = load_lm(config.target, **how)
    longest = longest_sequence([*prompts, warm_up], config.max_new_tokens, target.info.max_position)
    models = load_models(named, model_paths(config), longest, params, target, **how)
    eos_ids = () if config.ignore_eos else target.info.eos_ids
    runners = make_runners(config, named, models, params, eos_ids)
    trace = TraceFile(config.trace) if config.trace is not None else None
    if trace is not None:
        runners = {label: traced(label, runner, trace) for label, runner in runners.items()}
    answering = {label: in_groups(runner) for label, runner in runners.items()}
    with between_prompts(len(prompts), trace) as advance:
        measured = measure(
            answering, prompts, warm_up, config.max_new_tokens, config.repeats, config.seed, advance, config.batch_size
        )
    compare = params.greedy and target.dtype == torch.float32
    how_taken = {
        "clock": config.clock,
        "methods": {item.label: dataclasses.asdict(item.method) for item in named},
        "eos_ids": list(eos_ids),
    }
    smaller = {"draft": models.draft, "mid": models.mid}
    meta = describe("bench", config, target, prompts, config.prompts, smaller, **how_taken)
    results = {
        "meta": meta,
        "methods": summarise(measured, config.clock, config.seed, compare),
    }
    config.output.mkdir(parents=True, exist_ok=True)
    write_lines(config.output / PER_PROMPT, prompt_rows(measured))
    write_json(config.output / RESULTS, results)
    if config.card:
        for directory in write_cards(results, named, model_paths(config)):
            say(f"Model card: {Path(directory) / CARD}")
    return results


@contextmanager
def between_prompts(total: int, trace: TraceFile | None) -> Iterator[Callable[[int], None]]:
    """A progress bar that is drawn only when it is advanced: one that redraws itself takes CPU time from the clocks."""
    left = (TextColumn("prompts, left"), TimeRemainingColumn())
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), *left)
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=total)

        def done(count: int) -> None:
            if trace is not None:
                trace.flush()
            progress.update(task, advance=count, refresh=True)

        yield done


def traced(label: str, runner: Runner | BatchRunner, file: TraceFile) -> Runner | BatchRunner:
    """The engine's own methods can be traced; transformers' are as they are."""
    return TracedRunner(label, runner, file) if isinstance(runner, EngineRunner) else runner


def in_groups(runner: Runner | BatchRunner) -> GroupRunner:
    return runner if isinstance(runner, BatchRunner) else OneByOne(runner)


def asked_for(config: BenchConfig) -> str:
    """All methods, each once: `decode` takes one `method` and this command `methods`; a decode.yaml serves both."""
    listed = [label.strip() for label in config.methods.split(",")]
    return config.methods if config.method is None or config.method in listed else f"{config.methods},{config.method}"


def with_baseline(named: Sequence[Named]) -> list[Named]:
    """`ar` first: every speed-up is against it, listed or not."""
    rest = [method for method in named if method.label != BASELINE]
    return [*parse_methods(BASELINE), *rest]


def check(config: BenchConfig, named: Sequence[Named]) -> SamplingParams:
    """What can be found wrong before anything is loaded."""
    for field in ("repeats", "num_threads", "max_new_tokens", "batch_size"):
        at_least(field, getattr(config, field), 1)
    at_least("limit", config.limit, 0)
    if config.batch_size > 1:
        check_batch(config, named)
    for method in named:
        check_needs(method, model_paths(config))
    if config.card:
        check_cards(named, model_paths(config))
    check_device(config.device)
    return config.sampling


def check_batch(config: BenchConfig, named: Sequence[Named]) -> None:
    """What cannot be done to several prompts together."""
    size = f"with batch_size {config.batch_size}"
    if config.trace is not None:
        raise InputError("trace", f"{config.trace} {size}", "batch_size 1", "Trace prompt by prompt.")
    if config.engine == "hf":
        raise InputError("engine", f"hf {size}", "lean, which decodes in batches", "Pass --batch-size 1.")
    for item in named:
        if not item.method.batchable:
            able = ", ".join(name for name, method in METHODS.items() if method.batchable)
            raise InputError("methods", f"{item.label} {size}", f"some of {able}", "Measure it with --batch-size 1.")


def check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError("device", repr(name), "cpu, cuda or cuda:N", "Correct it.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device", name, "a device of this machine (no GPU is visible)", "Pass --device cpu.")


def model_paths(config: Any) -> dict[str, str | None]:
    """Flag -> what the user passed."""
    return {flag: getattr(config, flag) for flag in ("target", "draft", "mid", "eagle", "acceptance")}


def longest_sequence(prompts: Sequence[BenchPrompt], max_new_tokens: int, context: int) -> int:
    """Tokens of the longest prompt with its answer.

    Raises:
        InputError: a prompt that leaves no room in the context.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    length = len(longest.prompt_ids)
    if length >= context:
        found = f"{length} tokens in prompt {longest.id}"
        raise InputError("prompts", found, f"at most {context - 1}, the target's context", "Shorten or remove it.")
    return min(length + max_new_tokens, context)


def make_runners(
    config: BenchConfig, named: Sequence[Named], models: Models, params: SamplingParams, eos_ids: tuple[int, ...]
) -> dict[str, Runner | BatchRunner]:
    """Label -> method, ready to answer. transformers' models are loaded only for the methods that use them."""
    session: RowsSession | None = None
    fixed: Session | None = None
    loaded: dict[str, Any] = {}

    def hf_model(flag: str) -> Any:
        if flag not in loaded:
            path = str(models.paths[flag])
            loaded[flag] = load_hf_model(path, config.dtype, config.device, config.trust_remote_code)
        return loaded[flag]

    runners: dict[str, Runner | BatchRunner] = {}
    for label, method in ((item.label, item.method) for item in named):
        if isinstance(method, HFAssisted):
            runners[label] = HFRunner(hf_model("target"), params, eos_ids, hf_model("draft"), method.k, method.t)
        elif isinstance(method, HFGenerate):
            runners[label] = HFRunner(hf_model("target"), params, eos_ids)
        elif in_batches(config, method, models):
            target = rows_lm("target", models.target)
            session = session or target.rows_session(config.batch_size, models.capacity)
            drafter = method.build_batch(models, config.batch_size)
            runners[label] = BatchRunner(target, session, drafter, params, eos_ids)
        else:
            # On a GPU the graphs of a session are worth keeping.
            if fixed is None and models.target.device.type == "cuda":
                fixed = models.target.session(models.capacity)
            runners[label] = EngineRunner(models.target, method.build(models), params, eos_ids, session=fixed)
    return runners


def in_batches(config: BenchConfig, method: Method, models: Models) -> bool:
    """Whether the batched loop runs it: several prompts at a time, or one on a GPU, which it keeps busier."""
    if config.batch_size > 1:
        return True
    lean = all(isinstance(lm, LlamaLM) for lm in (models.target, models.draft) if lm is not None)
    return torch.device(config.device).type == "cuda" and method.batchable and lean and config.trace is None


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """JSON lines, whole or not at all."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    publish(partial, path)

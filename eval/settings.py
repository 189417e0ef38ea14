"""Options of the commands of this folder, in one file that loads no model (as data/settings.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from draftsmith.data.settings import (
    Sampling,
    ServedTarget,
    Target,
    check_left_out,
    comma_numbers,
    volatile,
)
from draftsmith.data.stages import Turns, number_of_tokens
from draftsmith.modules.drafters import MODEL
from draftsmith.modules.types import InputError, SamplingParams, check_range, check_ranges

if TYPE_CHECKING:
    from draftsmith.eval.clock import ClockName

# Formats of heads that can be written, and that can be read (modules/formats).
WrittenFormat = Literal["eagle", "vllm", "sglang", "speculators", "llamacpp", "mtp"]
AnyFormat = Literal["auto", WrittenFormat, "deepspec", "specforge", "modelopt", "torchspec", "specdec_pp"]
SYSTEMS = {"vllm": "vLLM", "llamacpp": "llama.cpp"}
LENGTHS = "0,1,3,5"  # of drafts, where the server is started here
MOST_REQUESTS = 4096
ROLES = ("target", "mid", "acceptance")  # other models, named by their options
# Of a bench's numbers, beside those by a column of its rows, of which `language` is detected where rows lack it.
DIVISIONS = ("context", "turn", "kind", "task")


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Options of a command that uses drafters.

    Attributes:
        head: Directory of a trained head, or a draft model; repeated for several.
    """

    head: tuple[str, ...] | str | None = volatile(())
    several: ClassVar[bool] = False  # whether it takes several drafters of one kind

    def __post_init__(self) -> None:
        value: Any = self.head
        object.__setattr__(self, "head", (value,) if isinstance(value, str) else tuple(value or ()))

    @cached_property
    def drafters(self) -> dict[str, str]:
        """Paths by `draft` (a language model) or the kind of the head; `kind@name` for each of several of a kind."""
        from draftsmith.modules.pretrained.directory import check_own
        from draftsmith.modules.pretrained.heads import kind_at
        from draftsmith.modules.pretrained.hub import CHECK_PATH, repository, resolve_model

        paths: dict[str, str] = {}
        by_kind: dict[str, list[str]] = {}
        for path in self.head or ():
            kind = kind_at(path) or MODEL
            if kind != MODEL:
                path = resolve_model(path)
            elif not os.path.exists(resolved := resolve_model(path)) and repository(resolved) is None:
                raise InputError("head", f"no directory {path}", "a draft model or a trained head", CHECK_PATH)
            else:
                check_own(resolved)
            if kind == "acceptance":
                remedy = "Pass it with --acceptance."
                raise InputError("head", f"{path}, an acceptance head", "a model or head that drafts", remedy)
            by_kind.setdefault(kind, []).append(path)
            if kind in paths and not self.several:
                found = f"{paths[kind]} and {path}, two {'draft models' if kind == MODEL else f'{kind} heads'}"
                remedy = "Pass one of them; `draftsmith eval bench` measures both."
                raise InputError("head", found, "one of a kind", remedy)
            paths.setdefault(kind, path)
        for kind, own in by_kind.items():
            if len(own) > 1:
                paths |= {f"{kind}@{name}": path for name, path in zip(short_names(own), own, strict=True)}
        return paths

    @cached_property
    def paths(self) -> dict[str, str]:
        """Paths of `drafters`, and of the command's other models by their options."""
        others = {role: getattr(self, role, None) for role in ROLES}
        return {role: str(path) for role, path in others.items() if path} | self.drafters


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last part in which all paths differ, for each: a and b of runs/a/best and runs/b/best."""
    parts = [Path(path).parts for path in paths]
    for depth in range(1, min(map(len, parts)) + 1):
        names = [re.sub(r"[^\w.+-]", "_", own[-depth]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [str(number) for number in range(1, len(paths) + 1)]


@dataclass(frozen=True, kw_only=True)
class Running(Target):
    """Target of models that decode, with their threads and seed.

    Attributes:
        num_threads: CPU threads. With one, speed is measured in CPU time, which does not see other programs.
        seed: Seed of sampling, and of the bootstrap.
    """

    help_group: ClassVar[str] = "Target"

    num_threads: int = 1
    seed: int = 0

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_lm` for the target."""
        return super().loading | {"packed": True}

    @property
    def clock(self) -> ClockName:
        from draftsmith.eval.clock import clock_name

        return clock_name(self.chosen_device, self.num_threads)


@dataclass(frozen=True, kw_only=True)
class PromptChoice:
    """Prompts that are taken from a source.

    Attributes:
        split: Keep prompts of this split (train, dev or test of embedded:prompts; val of the output of `data prompts`:
            those that a training on its answers holds out).
        tasks: Keep prompts whose own task is one of these, separated by commas.
    """

    split: str | None = None
    tasks: str | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerLength:
    """Length of answers.

    Attributes:
        max_new_tokens: Longest answer.
        ignore_eos: Continue after the end token, up to max_new_tokens.
    """

    max_new_tokens: int = 128
    ignore_eos: bool = False


@dataclass(frozen=True)
class DecodeConfig(DraftSettings, AnswerLength, Sampling, Running):
    """Answers one prompt and shows which of its tokens were drafted and accepted, and which the target gave itself.

    Attributes:
        prompt: what to ask; `-` reads standard input.
        target: model directory, hub id or embedded:target.
        mid: model between draft and target, for pre-verify, pre+self-verify and hsddw.
        acceptance: acceptance head directory, for cost and specdec++; trained for what drafts.
        method: name:setting=value, as in `draftsmith eval bench`; auto is online with what is given: a chain ends when
            one more token is worth less than its time, by the draft's own confidence and the verdicts so far, and by
            the acceptance head where one is given.
        system: a system message that goes before the prompt.
        raw: read the prompt as it is, without the chat template.
    """

    prompt: str
    target: str = "embedded:target"
    mid: str | None = None
    acceptance: str | None = None
    method: str = "auto"
    system: str | None = None
    raw: bool = False
    max_new_tokens: int = field(default=256, kw_only=True)


@dataclass(frozen=True)
class BenchConfig(DraftSettings, PromptChoice, AnswerLength, Sampling, Running, ServedTarget):
    """Measures decoding methods against this engine's own autoregressive decoding.

    Attributes:
        target: model directory, hub id or embedded:target.
        data: JSONL, JSON or Parquet file of chats, output of `data prompts`, a data set, or embedded:prompts. Several,
            separated by commas or the files of a directory, are a task each, named by their files. They may be
            FastChat's and Spec-Bench's JSONL (`turns`), ShareGPT, messages or plain prompts. Or benchmarks by name,
            fetched from the hub: six-tasks (EAGLE's), spec-bench, speed-bench, deepspec.
        mid: model between draft and target, M2 of pre-verify, pre+self-verify and hsddw.
        acceptance: acceptance head directory, for specdec++ and cost; trained for what drafts.
        methods: name:setting=value, separated by commas; ar is always measured. One model: ar, pld:k=10:ngram=3.
            With a draft: spec:k=5, specdec++:h=0.7:min=2:max=20:calibrated=off, cost:c=auto:min=1:max=16,
            online:c=auto:min=1:max=16, confidence:t=0.4:min=1:max=20, self-verify:k=10; the five
            policies from specdec++ to self-verify also with drafter=KIND, by a trained head of that kind. Three models:
            pre-verify:k=10, pre+self-verify:k=10, hsddw:k=10:max=20. A head's own methods begin with its kind;
            docs/decoding.md lists them all. Of several --head of one kind each is measured, named by what its path
            differs in: eagle3@a:k=5 and eagle3@b:k=5 of runs/a/best and runs/b/best.
        turns: which user turns of a conversation are asked. all: one after the other; every method is asked a later
            turn after the answers that ar gave to the earlier ones. first: the first. last: the last, after recorded
            answers. each: every one after recorded answers and results of tools, which all does where there are any.
        replay: answers of this target, in place of prompts: acceptance of chains of a fixed length and of pld on them,
            by the length of drafts, without decoding. Output of `data responses`, which records its sampling, or of
            `data prompts --supervised`, or a file of chats whose last turn is the answer, sampled by --temperature.
        limit: measure the first so many prompts, of each file where --data has several; 0 takes all.
        by: what the numbers are divided by, separated by commas: context (tokens before a round), turn, kind (what a
            round's first token is part of: thinking, call, code or prose), task, language (of each answer, detected
            where rows have no such column, with the extra `languages`), and columns of the rows.
        temperature: 0 is greedy; several are separated by commas (0,1). Speed-ups are over ar at the same one. Equality
            with ar is checked in float32 only.
        repeats: runs of every method on every prompt; the median counts.
        traces: answer the first so many prompts of each task once more with every method of this engine, off the clock,
            and write their rounds to trace.jsonl in output. There methods that learn begin anew, with these prompts
            only.
        card: write what was measured into the directories of the heads that were used, and into their model cards.
        output: directory that receives results.json and prompts.parquet (a row for every method, prompt and turn). The
            same command resumes an interrupted run, and says that a finished one is done.
        again: measure a finished run anew.
    """

    target: str
    data: str | None = None
    mid: str | None = None
    acceptance: str | None = None
    methods: str = "ar"
    turns: Turns = "all"
    replay: str | None = None
    limit: int = 0
    by: str = "context,turn,kind,task"
    # Overrides the one of `Sampling`: a bench takes several. mypy allows only narrower types.
    temperature: str = field(default="0", kw_only=True)  # type: ignore[assignment]
    repeats: int = 3
    traces: int = 0
    card: bool = False
    output: Path = field(kw_only=True)
    again: bool = field(default=False, kw_only=True)
    several: ClassVar[bool] = True

    @property
    def divisions(self) -> list[str]:
        """Names that `by` lists."""
        return list(dict.fromkeys(part.strip() for part in self.by.split(",") if part.strip()))

    @property
    def columns(self) -> list[str]:
        """Columns of the rows among them."""
        return [name for name in self.divisions if name not in DIVISIONS]

    @property
    def modes(self) -> list[SamplingParams]:
        """Sampling at each temperature."""
        temperatures = comma_numbers("temperature", str(self.temperature), float)
        return [SamplingParams(temperature, self.top_k, self.top_p) for temperature in temperatures]


@dataclass(frozen=True)
class CompareConfig:
    """Compares two runs of `draftsmith eval bench` over the prompts that both measured, with paired intervals.

    Runs of another target, tokenizer, dtype, of other sampling settings or prompts are refused: their numbers are not
    of the same thing. Methods of one name are compared, or the only method of each run beside ar.

    Attributes:
        runs: directories of the two runs; ratios and differences are those of the second over the first.
    """

    runs: list[str]

    def __post_init__(self) -> None:
        if len(self.runs) != 2:
            expected = "two directories of `draftsmith eval bench`"
            raise InputError("runs", f"{len(self.runs)} of them", expected, "Name two.")


@dataclass(frozen=True)
class ReportConfig:
    """Show runs as one HTML file that loads nothing: tables, and traced answers token by token.

    Attributes:
        runs: directories with results.json (of `eval bench`, `served` and `certify`). Each gets a section of its own.
        output: the HTML file; by default report.html in the first run's directory.
    """

    runs: tuple[Path, ...]
    output: Path | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.runs:
            raise InputError("runs", "none", "one or more directories of runs", "Name them: eval report RUN ...")
        if self.output is None:
            object.__setattr__(self, "output", self.runs[0] / "report.html")


@dataclass(frozen=True, kw_only=True)
class ServedConfig(PromptChoice):
    """Measure a drafter in a server, by requests at once and draft length, against the same server without it.

    llama.cpp's servers run at the same time and take turns, so that a busy machine slows them alike; vLLM's, which take
    the whole memory of a GPU, run one after another.

    Attributes:
        engine: The server, which is started here; sglang is measured with --server only, without its drafts.
        server: Address of a running server, in place of starting one. Its draft length is its own.
        target: The target as it is served: for llama.cpp its GGUF file, for vLLM a directory or hub id.
        head: What `export --format llamacpp` (a GGUF file or its directory) or `--format vllm` wrote, or a draft
            model.
        data: Prompts, as for `eval bench`.
        limit: The first so many prompts of each file; 0 takes all.
        concurrency: Numbers of requests at once, separated by commas; no more than there are prompts.
        contexts: Measure prompts by their length, one class at a time: classes begin at these numbers of tokens,
            separated by commas, such as 1k,4k (1k is 1,024). Each has as many prompts as there are requests at once.
        num_drafted: Draft lengths (--spec-draft-n-max, num_speculative_tokens), separated by commas; 0, the plain
            server, is always measured. Default: 0,1,3,5.
        p_min: llama.cpp's thresholds to measure with each (--spec-draft-p-min): a draft ends before a token of less
            probability.
        repeats: Times that all prompts are asked.
        max_new_tokens: Longest answer.
        temperature: 0 is greedy, where answers are compared with the plain server's.
        num_threads: Threads of every server.
        engine_path: llama-server, or the Python of an environment with vLLM. Default: that of `make engines` in this
            directory, or llama-server on the PATH, or this Python.
        output: Directory that receives results.json, and of vLLM vllm-schedule.json and sglang-schedule.json, the best
            draft length by requests at once in the form that these servers read; with --contexts also for each alone.
        again: Measure a finished run anew.
    """

    engine: Literal["llamacpp", "vllm", "sglang"] = "llamacpp"
    server: str | None = None
    target: str
    head: Path | None = None
    data: str
    limit: int = 8
    concurrency: str = "1"
    contexts: str | None = None
    num_drafted: str | None = None
    p_min: str = "0"
    repeats: int = 1
    max_new_tokens: int = 96
    temperature: float = 0.0
    num_threads: int = 1
    engine_path: Path | None = None
    output: Path
    again: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, max_new_tokens=1, num_threads=1, repeats=1, limit=0, temperature=0.0)
        if self.edges:
            check_range("contexts", self.edges[0], 1)
        for name, numbers, least in (("num_drafted", self.lengths, 0), ("concurrency", self.loads, 1)):
            if not all(least <= number <= MOST_REQUESTS for number in numbers):
                raise InputError(name, getattr(self, name), f"numbers from {least} to {MOST_REQUESTS:,}", "Correct it.")
        if self.engine != "llamacpp" and any(self.thresholds):
            raise InputError("p_min", self.p_min, "none: only llama.cpp ends a draft early", "Leave it out.")
        if self.server is None and (self.head is None or self.engine == "sglang"):
            found = f"{self.engine} without --server, head {self.head}"
            raise InputError("head", found, "a drafter, and llamacpp or vllm to serve it", "Pass --head or --server.")
        if self.server is not None:
            names = ("head", "num_drafted", "p_min", "engine_path")
            check_left_out(self, names, "with --server", "none: the running server has its own")

    @property
    def loads(self) -> list[int]:
        return sorted(comma_numbers("concurrency", self.concurrency, int))

    @property
    def edges(self) -> list[int]:
        return sorted(comma_numbers("contexts", self.contexts, number_of_tokens)) if self.contexts else []

    @property
    def lengths(self) -> list[int]:
        return sorted(comma_numbers("num_drafted", self.num_drafted or LENGTHS, int))

    @property
    def thresholds(self) -> list[float]:
        return comma_numbers("p_min", self.p_min, float)


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Read what a server counts of its drafts, beside what the head's card measured, and say whether they are accepted
    as measured. Nothing but the counters is asked for. Exits with 1 below what was measured, and with 3 if it cannot
    tell.

    Attributes:
        head: Directory of the head that is served, with a card of `eval bench --card`.
        server: Address of a vLLM or SGLang server, or of a llama.cpp server with --metrics.
        counters: In place of --server a file: saved pages of /metrics, or answers with the counts of their drafts, one
            response or logged request a line.
        state: File that keeps what was counted, with which the same command continues.
        temperature: Temperature of the card's answers. Default: the only one that was measured.
        served: Run of `eval served` for this server, to say whether another draft length would be faster.
        once: Look once, not every --interval-s seconds.
        interval_s: Seconds between looks.
        alpha: Highest probability that answers like the card's are ever called below it.
    """

    head: str
    server: str | None = None
    counters: Path | None = None
    state: Path | None = None
    temperature: float | None = None
    served: Path | None = None
    once: bool = False
    interval_s: float = 60.0
    alpha: float = 1e-3

    def __post_init__(self) -> None:
        check_range("alpha", self.alpha, 0.0, 1.0, "()")
        check_range("interval_s", self.interval_s, 0.0, 86_400.0, "(]")
        if (self.server is None) == (self.counters is None):
            found = "neither of them" if self.server is None else "both"
            raise InputError("server, counters", found, "one: a running server, or a file", "Pass one of them.")
        if self.counters is not None:
            check_left_out(self, ("state", "once", "interval_s"), "with --counters", "none: the file is read once")


@dataclass(frozen=True, kw_only=True)
class CertifyConfig(ServedTarget):
    """Certify that a server's answers follow the target. The exit code is 1 if they do not.

    Attributes:
        target: the model that is served, in the weights that are served: a directory, hub id or GGUF file.
        data: output of `data responses`, asked of the server that speculates.
        control: the same of the server without its drafter, with as many answers or more.
        head: the head or model that the server drafts with, if it runs here: its distribution at every token makes
            smaller mistakes visible.
        output: directory that receives results.json.
        limit: only the first so many answers; 0 takes all.
        num_threads: CPU threads.
        alpha: highest probability that answers which follow the target fail.
    """

    target: str
    data: Path
    control: Path | None = None
    head: str | None = None
    output: Path
    limit: int = 0
    num_threads: int = 1
    alpha: float = 1e-3

    def __post_init__(self) -> None:
        check_ranges(self, num_threads=1, limit=0)
        check_range("alpha", self.alpha, 0.0, 1.0, "()")

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_target`."""
        return super().loading | {"packed": True}


@dataclass(frozen=True, kw_only=True)
class CheckConfig(ServedTarget):
    """Read a directory as another system would and compare its names, settings and logits with ours; with --engine
    vllm or llamacpp, serve it and compare answers, drafts and accepted tokens with our own chain. Exits with 1 on any
    difference, and with 3 if it cannot tell.

    Attributes:
        directory: The directory to check.
        format: The system that is to read it; auto detects whose directory it is, and adds a line for every other.
        target: The target model.
        target_gguf: The target's GGUF file, which llama.cpp serves. Default: --target if it is one.
        head: The head that the directory was exported from, to compare logits with.
        engine: own reads the files here; vllm and llamacpp serve the directory (a head, or a draft model) with the
            target, greedily.
        dtype: Type of the weights; auto is float32 on a CPU and beside a server, else the checkpoint's own.
        engine_path: Python of an environment with vLLM, or llama-server of llama.cpp, which is started. Default: that
            of `make engines` in this directory, else this Python, or llama-server on the PATH.
        server: Address of a server: with --engine own a vLLM server that runs the target (`draftsmith launch vllm`),
            else a running one with this target and drafter, instead of starting one.
        data: Held-out prompts, as for `eval bench`. Default for the embedded target: its own, of the test split.
        split: Keep prompts of this split.
        limit: Number of prompts, from the start.
        max_new_tokens: Longest answer.
        num_drafted: Drafted tokens per round; 0 means 5, of a block drafter all of a block, or what a vLLM server
            drafts.
    """

    directory: Path
    format: AnyFormat = "auto"
    target: str | None = None
    target_gguf: Path | None = None
    head: str | None = None
    engine: Literal["own", "vllm", "llamacpp"] = "own"
    engine_path: Path | None = None
    data: str | None = None
    split: str | None = None
    limit: int = 12
    max_new_tokens: int = 96
    num_drafted: int = 0

    def __post_init__(self) -> None:
        check_ranges(self, limit=1, max_new_tokens=1, num_drafted=0)
        if self.target_gguf is not None and self.engine != "llamacpp":
            raise InputError("target_gguf", self.target_gguf, "--engine llamacpp, which serves it", "Leave it out.")
        for name in ("engine_path", "data"):
            if getattr(self, name) is not None and self.engine not in SYSTEMS:
                expected = "--engine vllm or llamacpp, which read it"
                raise InputError(name, getattr(self, name), expected, "Add it, or leave this out.")

    @property
    def target_server(self) -> str | None:
        # A server with the drafter is the one that is checked: our own chain decodes, which needs the whole target.
        return None if self.engine in SYSTEMS else self.server

    @property
    def loading(self) -> dict[str, Any]:
        if self.engine not in SYSTEMS:
            return super().loading
        return super().loading | {"dtype": "float32" if self.dtype == "auto" else self.dtype}


@dataclass(frozen=True)
class DiagnoseConfig(ServedTarget):
    """Measure a trained draft head, its data and its target, and name the likeliest cause of low acceptance with its
    remedy. With --write, find what is wrong in a head's files, by how it drafts under every plausible reading, and
    write it corrected.

    Attributes:
        head: Directory of a trained draft head of any kind; with --write also a head of another system, as for
            `import`.
        data: Answers like those that it was trained on: responses, features, or supervised prompts. With --write
            responses, or prompts, which the target then answers here, greedily. Several are joined, as in training.
        target: Directory, hub id or GGUF file of the target model, or embedded:target.
        limit: Rows to read. Default: 200, with --write 24.
        write: Directory that receives the head as declared (where it is another system's), repaired, and, as `files`,
            in the format that it came in, if that is one that `export` writes.
        max_new_tokens: Length of the answers that are made for --write.
    """

    head: str
    data: tuple[str, ...] | str | Path
    target: str = "embedded:target"
    limit: int | None = None
    write: Path | None = None
    max_new_tokens: int = 96

    def __post_init__(self) -> None:
        check_ranges(self, max_new_tokens=1, limit=1)

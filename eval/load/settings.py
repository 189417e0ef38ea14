"""Settings of `eval load`, and what of them can be found wrong before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.heads.draft_settings import DraftSettings
from draftsmith.data.models.device import check_device
from draftsmith.data.settings import Sampling, check_not_negative, check_positive, comma_numbers
from draftsmith.eval.bench.load import check_methods
from draftsmith.eval.bench.results import BASELINE
from draftsmith.eval.cost.clock import ClockName, clock_name
from draftsmith.eval.load.requests import Load
from draftsmith.eval.load.server import Dialect
from draftsmith.eval.load.summary import Goals
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.modules.drafters.methods import Named, known_methods, parse_methods
from draftsmith.modules.types import InputError


@dataclass(frozen=True)
class LoadConfig(DraftSettings, PromptChoice, AnswerLength, Sampling, Running):
    """Measures decoding methods, or servers, under many requests at once.

    Attributes:
        target: model directory, hub id or embedded:target; with --server the model that it serves, for its tokenizer.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts.
        acceptance: acceptance head directory, for specdec++ and cost.
        methods: name:setting=value, separated by commas, as `draftsmith eval bench` takes them; ar is always measured.
            Each decodes all requests that are under way together, and admits the next one as soon as one is complete.
        server: address of an OpenAI-compatible server in place of methods; several as NAME=URL, separated by commas.
            What is named ar is what the others are compared with.
        dialect: of the server. openai is asked for nothing beyond the OpenAI protocol; vllm, for token ids too.
        concurrency: closed loops of so many users, separated by commas. Each asks again as soon as the last answer is
            complete. Left out with rates, none.
        rates: open loops of so many requests a second on average (Poisson), separated by commas.
        max_rows: most requests that methods decode together in an open loop; the others wait.
        requests: requests that count, of each method under each load and in each repeat.
        warmup: requests before them that do not count; in a closed loop at least as many as there are users. Methods
            that learn begin anew in each block, and learn here first.
        limit: ask the first so many prompts; 0 takes all.
        repeats: blocks of each method under each load. Each has an order of prompts and a schedule of its own.
        clock: wall, or cpu: time that passes as this process works and is skipped where it waits, whatever other
            programs on the machine do. One CPU thread only.
        goal_ttft_ms: goodput counts requests whose first token comes within this, in milliseconds.
        goal_tpot_ms: and whose further tokens take at most this each, on average.
        costs: directory of an earlier run of `draftsmith eval bench` or `draftsmith eval tune`, whose measured costs
            are taken.
        output: directory that receives results.json and requests.parquet (a row for every request that counts). A run
            that was interrupted goes on there when the same command is given again.
    """

    target: str
    prompts: str
    acceptance: str | None = None
    methods: str | None = None
    server: str | None = None
    dialect: Dialect = "vllm"
    concurrency: str | None = None
    rates: str | None = None
    max_rows: int = 32
    requests: int = 64
    warmup: int = 8
    limit: int = 0
    repeats: int = 1
    clock: ClockName = "wall"
    goal_ttft_ms: float | None = None
    goal_tpot_ms: float | None = None
    costs: Path | None = None
    output: Path = dataclasses.field(kw_only=True)

    @property
    def loads(self) -> list[Load]:
        """Closed loops, then open ones, each by their size."""
        users, rates = self.concurrency, self.rates
        if users is None and rates is None:
            users = "1,2,4,8,16,32,64"
        closed = [Load("closed", value) for value in positive("concurrency", users, int)]
        return [*closed, *(Load("open", value) for value in positive("rates", rates, float))]

    @property
    def goals(self) -> Goals:
        ttft, tpot = (ms if ms is None else ms / 1000 for ms in (self.goal_ttft_ms, self.goal_tpot_ms))
        return Goals(ttft, tpot)

    @property
    def goals_text(self) -> str:
        goals = {"first token": self.goal_ttft_ms, "each further one": self.goal_tpot_ms}
        return " and ".join(f"{name} in {ms:g} ms" for name, ms in goals.items() if ms is not None)

    @property
    def servers(self) -> dict[str, str]:
        """Name -> address."""
        found: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in (self.server or "").split(","))):
            name, named, url = part.partition("=")
            if not named or "/" in name:  # an address may have a = of its own
                name, url = "server", part
            if name in found:
                raise InputError("server", f"{name} twice", "each server once", "Name them: NAME=URL,NAME=URL.")
            found[name] = url
        return found

    @property
    def named(self) -> list[Named]:
        """Methods, `ar` first; none with a server."""
        if self.server is not None:
            return []
        given = parse_methods(self.methods or BASELINE)
        return [*parse_methods(BASELINE), *(item for item in given if item.label != BASELINE)]


def positive(field: str, text: str | None, kind: Callable[[str], float]) -> list[float]:
    """Numbers separated by commas, by their size; none of nothing."""
    found = [] if text is None else sorted(comma_numbers(field, text, kind))
    if found and not 0 < found[0] <= found[-1] < math.inf:
        raise InputError(field, repr(text), "numbers above 0", "Correct it.")
    return found


def check(config: LoadConfig) -> None:
    """What can be found wrong before anything is loaded.

    Raises:
        InputError: whatever it is.
    """
    check_positive(config, "requests", "repeats", "num_threads", "max_new_tokens", "max_rows")
    check_not_negative(config, "limit", "warmup")
    for name in ("goal_ttft_ms", "goal_tpot_ms"):
        goal = getattr(config, name)
        if goal is not None and not 0 < goal < math.inf:
            raise InputError(name, goal, "milliseconds, above 0", "Correct it.")
    assert config.loads and config.sampling  # which check them
    if config.server is not None:
        check_server(config)
        return
    check_methods(config.named, config.paths)
    check_device(config.device)
    if config.engine == "hf":
        raise InputError("engine", "hf", "lean, which decodes rows together", "Leave it out.")
    for item in config.named:
        if not item.method.batchable:
            able = ", ".join(name for name, method in known_methods().items() if method.batchable)
            raise InputError("methods", f"{item.label}, which decodes alone", f"some of {able}", "Leave it out.")
    if config.clock == "cpu" and clock_name(config.device, config.num_threads) != "cpu":
        found = f"cpu with {config.num_threads} threads on {config.device}"
        raise InputError("clock", found, "cpu with one thread on a CPU", "Pass --clock wall.")


def check_server(config: LoadConfig) -> None:
    given = {"methods": config.methods, "draft": config.drafters or None, "acceptance": config.acceptance}
    for name, value in given.items():
        if value is not None:
            remedy = "What drafts is the server's own; measure methods of this engine in a run of their own."
            raise InputError(name, f"{name} with --server", "one of the two", remedy)
    if config.clock == "cpu":
        raise InputError("clock", "cpu with --server", "wall: its work is not this process's", "Leave it out.")
    if not config.servers:
        raise InputError("server", repr(config.server), "an address", "Pass --server http://HOST:PORT.")

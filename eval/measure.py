"""A bench of one's own callables and drafters in Python, as a table: what `draftsmith eval bench` measures by names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.eval.answer import MOST_SEED, Answer, Prompt, encode, token_ids
from draftsmith.eval.bench.measuring import PromptFailed, measure_group
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import BASELINE, Row, summarise
from draftsmith.eval.bench.runner import DRAFT_ROOM, EngineRunner, Runner
from draftsmith.eval.clock import clock_name
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.decoding.trace import DecodeTrace
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams, at_most, whole_number

if TYPE_CHECKING:
    import pandas

# (token ids of the prompt, most new tokens, seed) -> the answer's token ids, or all that is known of it.
Decode = Callable[[list[int], int, int], "Sequence[int] | Generation | Answer"]
NUMBERS = ("prompts", "tokens", "tokens_per_s", "speedup", "tau", "discard_rate", "matches_ar", "cpu_s", "wall_s")
INTERVALS = ("speedup_ci95", "tau_ci95")


@dataclass(frozen=True)
class CallableRunner:
    """A callable as a method of a bench. Of one that gives token ids alone nothing is known of rounds."""

    label: str
    decode: Decode
    target: CausalLM

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        return [
            generation_of(self.label, self.decode(list(prompt), max_new_tokens, seed), max_new_tokens, self.target)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]


def generation_of(label: str, made: Any, max_new_tokens: int, target: CausalLM) -> Generation:
    """Convert what a callable returned. Of plain token ids those count that were asked for: up to the first end token,
    and to `max_new_tokens`.

    Raises:
        InputError: no token ids, or rounds with more tokens than were asked for, whose counts cannot be cut.
    """
    if isinstance(made, Answer):
        made = made.generation
    if isinstance(made, Generation):
        at_most(f"methods, {label}, tokens of an answer", max(len(made.tokens), made.trace.num_tokens), max_new_tokens)
        return made
    tokens = token_ids(f"methods, {label}, an answer", made, target)[:max_new_tokens]
    ends = [at for at, token in enumerate(tokens) if token in target.info.eos_ids][:1]
    tokens = tokens[: ends[0] + 1] if ends else tokens
    return Generation(tokens, DecodeTrace(prefill_emitted=len(tokens)), bool(ends))


def measure(
    methods: Mapping[str, Drafter | Decode | None],
    target: CausalLM,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    repeats: int = 2,
    seed: int = 0,
) -> pandas.DataFrame:
    """Speeds of ways to decode, side by side: prompt by prompt, in turn, medians over repeats, an uncounted first run.

    methods: by their names: what drafts (`load_drafter`), or a callable that decodes by itself. `ar`, the target alone
        by this decoder, is measured with them, and is what every speed-up is over.
    prompts: as of `generate`.

    Returns a row a method: tokens by second of the clock (this process's CPU time with one thread on a CPU, else the
    wall's), speed-up and tau with 95 % bootstrap intervals over prompts, share of discarded tokens, and whether greedy
    float32 answers are those of `ar`. tau and what goes with it are empty where a callable gives tokens alone.

    Raises:
        InputError: no prompts, or one that some method does not answer; a method that is called `ar`, or none.
    """
    import pandas

    for name, value, low in (("repeats", repeats, 1), ("max_new_tokens", max_new_tokens, 1), ("seed", seed, 0)):
        whole_number(name, value, low, MOST_SEED)
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence) or not prompts:
        raise InputError("prompts", repr(prompts)[:80], "a list of at least one prompt", "Pass [prompt] for one.")
    check_methods(methods)
    asked = [BenchPrompt(str(number), encode(target, prompt), number=number) for number, prompt in enumerate(prompts)]
    longest = max(len(prompt.prompt_ids) for prompt in asked) + max_new_tokens
    params = SamplingParams(temperature)
    runners = {
        label: runner_of(label, method, target, params, longest)
        for label, method in ({BASELINE: None} | dict(methods)).items()
    }
    measured: dict[str, list[Row]] = {label: [] for label in runners}
    try:
        measure_group(runners, asked[:1], 0, temperature, max_new_tokens, 1, [seed])  # off the clock
        for number, prompt in enumerate(asked):
            rows = measure_group(runners, [prompt], number, temperature, max_new_tokens, repeats, [seed + number])
            for row in rows:
                measured[row["method"]].append(row)
    except PromptFailed as failure:
        if isinstance(failure.__cause__, InputError):
            raise failure.__cause__ from None
        raise InputError("prompts", str(failure), "prompts that every method answers", "Leave it out.") from failure
    fair = params.greedy and str(target.dtype) == "torch.float32"
    summary = summarise(measured, clock_name(target.device), seed, fair, temperature)
    return pandas.DataFrame([flat(row) for row in summary]).set_index("method")


def check_methods(methods: Any) -> None:
    """Raises InputError for what cannot be measured, and for a name that `measure` itself gives."""
    if not isinstance(methods, Mapping):
        raise InputError("methods", repr(methods)[:80], "names and what decodes or drafts", "Pass a dict.")
    if BASELINE in methods:
        expected = f"another name: {BASELINE} is the target alone, which every speed-up is over"
        raise InputError("methods", f"one called {BASELINE}", expected, "Rename it.")
    for name, method in methods.items():
        if not (method is None or hasattr(method, "propose") or callable(method)):
            raise InputError(f"methods, {name}", repr(method)[:80], "a drafter or a callable", "Load it first.")


def runner_of(label: str, method: Any, target: CausalLM, params: SamplingParams, longest: int) -> Runner:
    """longest: tokens of a prompt with its answer."""
    if method is not None and not hasattr(method, "propose"):
        return CallableRunner(label, method, target)
    capacity = min(longest, target.info.max_position) + DRAFT_ROOM
    session = target.session(1, capacity, () if method is None else method.capture)
    return EngineRunner(target, method, params, tuple(target.info.eos_ids), session=session)


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of results.json as one of a table."""
    numbers: dict[str, Any] = {"method": row["method"], **{name: row[name] for name in NUMBERS}}
    for name in INTERVALS:
        low, high = row[name] or (None, None)
        numbers |= {name.replace("ci95", "low"): low, name.replace("ci95", "high"): high}
    if row["num_target_calls"] <= row["prompts"]:  # a callable of which only tokens are known
        numbers |= dict.fromkeys(("tau", "tau_low", "tau_high", "discard_rate"))
    return numbers

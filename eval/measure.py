"""A bench in Python: users' drafters and callables, measured as `draftsmith eval bench` does, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftsmith.eval.answer import Answer, Prompt, encode, token_ids
from draftsmith.eval.bench.measuring import PromptFailed, measure_prompt
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import BASELINE, Row, summarize, with_ends
from draftsmith.eval.bench.runner import DRAFT_ROOM, EngineRunner, Runner
from draftsmith.eval.clock import clock_name
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeTrace
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError, SamplingParams, check_range

if TYPE_CHECKING:
    import pandas

# (token ids of the prompt, most new tokens, seed) -> the answer's token ids, or the answer with its counts.
Decode = Callable[[list[int], int, int], "Sequence[int] | Answer"]
NUMBERS = ("prompts", "tokens", "tokens_per_s", "speedup", "tau", "acceptance_rate", "matches_ar", "cpu_s", "wall_s")


def runner_of(label: str, decode: Decode, target: CausalLM) -> Runner:
    """Return the runner of a user's callable. One that returns only token ids has no rounds to count."""

    def answer(prompt: Sequence[int], max_new_tokens: int, seed: int) -> Generation:
        made = decode(list(prompt), max_new_tokens, seed)
        if isinstance(made, Answer):
            return made.generation
        tokens = token_ids(f"methods, {label}, an answer", made, target)[:max_new_tokens]
        # Cut at an end token, as our own decoder does, so that the counts of tokens are comparable.
        ends = [at for at, token in enumerate(tokens) if token in target.info.eos_ids][:1]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        return Generation(tokens, DecodeTrace(prefill_emitted=len(tokens)), bool(ends))

    return answer


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
    """Measure ways to decode side by side: prompt by prompt, in turn, medians over repeats, after an uncounted run.

    methods: name -> a drafter (`load_drafter`), or a callable that decodes by itself. `ar`, the target alone with this
        decoder, is measured with them: every speed-up is over it.
    prompts: as of `generate`.

    Returns a row a method: tokens per second of the clock (this process's CPU time with one thread on a CPU, else the
    wall's), speed-up and tau with 95 % bootstrap intervals over prompts, the share of drafted tokens that were
    accepted, and whether greedy float32 answers are those of `ar`. tau and what follows from it are empty where a
    callable returns only tokens.

    Raises:
        InputError: no prompts, or one that some method does not answer; no methods, or one called `ar`.
    """
    import pandas

    check_range("repeats", repeats, 1)
    check_range("max_new_tokens", max_new_tokens, 1)
    # A single prompt is a sequence as well, of characters, bytes or messages.
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence) or not prompts:
        raise InputError("prompts", repr(prompts)[:80], "a list of at least one prompt", "Pass [prompt] for one.")
    if BASELINE in methods:
        expected = f"another name: {BASELINE} is the target alone, which every speed-up is over"
        raise InputError("methods", f"one called {BASELINE}", expected, "Rename it.")
    encoded = [BenchPrompt(str(number), encode(target, prompt), number=number) for number, prompt in enumerate(prompts)]
    longest = max(len(prompt.prompt_ids) for prompt in encoded) + max_new_tokens
    capacity = min(longest, target.info.max_position) + DRAFT_ROOM
    params = SamplingParams(temperature)
    runners: dict[str, Runner] = {}
    for label, method in ({BASELINE: None} | dict(methods)).items():
        drafter: Any = method
        if drafter is None or hasattr(drafter, "propose"):
            session = target.session(1, capacity, () if drafter is None else drafter.aux_layers)
            runners[label] = EngineRunner(target, drafter, params, tuple(target.info.eos_ids), session=session)
        else:
            runners[label] = runner_of(label, drafter, target)

    measured: dict[str, list[Row]] = {label: [] for label in runners}
    try:
        # The first run is not counted: it pays for the set-up.
        measure_prompt(runners, encoded[0], 0, temperature, max_new_tokens, 1, seed)
        for number, prompt in enumerate(encoded):
            rows = measure_prompt(runners, prompt, number, temperature, max_new_tokens, repeats, seed + number)
            for row in rows:
                measured[row["method"]].append(row)
    except PromptFailed as failure:
        if isinstance(failure.__cause__, InputError):
            raise failure.__cause__ from None
        raise InputError("prompts", str(failure), "prompts that every method answers", "Leave it out.") from failure

    fair = params.greedy and str(target.dtype) == "torch.float32"
    table = []
    for summary in summarize(measured, clock_name(target.device), seed, fair, temperature):
        numbers = with_ends(summary, ("method", *NUMBERS))
        # Of a callable that returns only tokens, no rounds were counted.
        if summary["num_target_calls"] <= summary["prompts"]:
            numbers |= dict.fromkeys(("tau", "tau_low", "tau_high", "acceptance_rate"))
        table.append(numbers)
    return pandas.DataFrame(table).set_index("method")

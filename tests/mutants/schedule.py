"""Mutants of what says how long servers should draft."""

from __future__ import annotations

from mutants.mutant import Mutant

ROUNDS, CHOICE, COSTS, SERVERS = (f"eval/schedule/{name}.py" for name in ("rounds", "choice", "costs", "servers"))
ROUNDS_TEST, CHOICE_TEST, COMMAND_TEST = (
    f"tests/eval/schedule/{name}_test.py" for name in ("rounds", "choice", "command")
)
SERVED_TEST = "tests/modules/acceptance/served_test.py::test_priors_are_of_verified_tokens_only"
TRACE_TEST = "tests/eval/bench/trace_test.py::test_what_was_known_before_a_draw_is_of_the_text_so_far[greedy]"

MUTANTS = [
    Mutant("schedule-behind-whole-drafts-all-is-rejected", ROUNDS, "unknown if accepted == k else 0.0", "0.0",
           (ROUNDS_TEST,)),
    Mutant("schedule-no-bonus-token", ROUNDS, "begins[place + k + 1]", "begins[place + max(k, 1)]",
           (ROUNDS_TEST,)),
    Mutant("schedule-a-rejected-token-is-drafted-anew", ROUNDS, "going *= accept_prob[at]", "going *= 1.0",
           (ROUNDS_TEST,)),
    Mutant("schedule-every-batch-takes-the-time-of-one", CHOICE, "/ np.array(seconds)", "/ np.array(seconds)[:1]",
           (CHOICE_TEST,)),
    Mutant("schedule-drafts-that-were-never-timed", CHOICE, "min(len(tokens_per_round) - 1, times.most_drafted)",
           "len(tokens_per_round) - 1", (CHOICE_TEST,)),
    Mutant("schedule-the-longest-of-equal-ones", CHOICE, "[int(k) for k in own.argmax(1)]",
           "[own.shape[1] - 1 - int(k) for k in own[:, ::-1].argmax(1)]", (CHOICE_TEST,)),
    Mutant("schedule-intervals-without-times", CHOICE, "resampled[:, base] * cheaper - 1", "resampled[:, base] - 1",
           (CHOICE_TEST,)),
    Mutant("schedule-one-draft-step-too-many", COSTS, "first + (k - 1) * step", "first + k * step", (COMMAND_TEST,)),
    Mutant("schedule-zero-for-vllm-unasked", "eval/schedule/command.py",
           "found.ranges if config.allow_zero else found.drafting_ranges", "found.ranges", (COMMAND_TEST,)),
    Mutant("schedule-starts-of-ranges-alone", SERVERS, "for size in (start, end)}", "for size in (start,)}",
           (COMMAND_TEST,)),
    Mutant("priors-of-what-was-never-reached", "modules/acceptance/served.py",
           "weight = ((steps <= accepted) & (steps < verified)).double()", "weight = (steps < verified).double()",
           (SERVED_TEST,)),
    Mutant("trace-repetitions-of-the-prompt-alone", "eval/bench/trace.py", "        text += done.done.tokens\n",
           "        pass\n", (TRACE_TEST,)),
]  # fmt: skip

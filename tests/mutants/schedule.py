"""Mutants of what says how long servers should draft."""

from __future__ import annotations

from mutants.mutant import Mutant

ROUNDS, CHOICE = "eval/schedule/rounds.py", "eval/schedule/choice.py"
ROUNDS_TEST, CHOICE_TEST, COMMAND_TEST = (
    f"tests/eval/schedule/{name}_test.py" for name in ("rounds", "choice", "command")
)

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
    Mutant("schedule-zero-for-vllm-unasked", "eval/schedule/command.py",
           "found.ranges if config.allow_zero else found.drafting_ranges", "found.ranges", (COMMAND_TEST,)),
]  # fmt: skip

"""Mutants of how long servers should draft."""

from __future__ import annotations

from mutants.mutant import Mutant

FILE, TESTS = "eval/schedule.py", ("tests/eval/schedule_test.py",)

MUTANTS = [
    Mutant("schedule-behind-whole-drafts-all-is-rejected", FILE, "unknown if accepted == k else 0.0", "0.0", TESTS),
    Mutant("schedule-no-bonus-token", FILE, "begins[place + k + 1]", "begins[place + max(k, 1)]", TESTS),
    Mutant("schedule-a-rejected-token-is-drafted-anew", FILE, "alive *= accept_prob[at]", "alive *= 1.0", TESTS),
    Mutant("schedule-every-batch-takes-the-time-of-one", FILE, "/ np.array(seconds)  #", "/ np.array(seconds)[:1]  #", TESTS),
    Mutant("schedule-drafts-that-were-never-timed", FILE, "min(len(tau) - 1, timed)", "len(tau) - 1", TESTS),
    Mutant("schedule-the-longest-of-equal-ones", FILE, "[int(k) for k in rate.argmax(1)]",
           "[rate.shape[1] - 1 - int(k) for k in rate[:, ::-1].argmax(1)]", TESTS),
    Mutant("schedule-intervals-without-times", FILE, " * times.at(size, base) / times.at(size, k) - 1", " - 1", TESTS),
    Mutant("schedule-zero-for-vllm-unasked", FILE, "vllm_config(ranges(schedule.drafting))",
           "vllm_config(ranges(schedule.lengths))", TESTS),
]  # fmt: skip

"""Mutants of the certificate, of traces, and of how heads are repaired."""

from __future__ import annotations

from mutants.mutant import Mutant

BETS, BETS_TEST = "eval/lossless/sampling.py", "tests/eval/lossless/sampling_test.py"
ROUNDS, ROUNDS_TEST = "eval/bench/trace.py", "tests/eval/bench/trace_test.py"
READINGS_TEST = "tests/modules/formats/readings_test.py"
FAIR = f"{BETS_TEST}::test_every_bet_is_fair_on_whole_rounds_of_every_method"

MUTANTS = [
    Mutant("drawn-children-bet-on-as-chosen", BETS, "elif tree.drawn is not None:", "elif False:", (FAIR,)),
    Mutant("drift-of-one-score", BETS, "math.log(4 * len(SCORES) / level)", "math.log(4 / level) / 9",
           (f"{BETS_TEST}::test_the_drift_is_bounded_as_the_theorem_says",)),
    Mutant("trace-chance-of-the-next-sibling", ROUNDS, "if node not in self.probs)", "if node in self._verdict.path)",
           (ROUNDS_TEST,)),
    Mutant("trace-equal-siblings-alike", ROUNDS, "for node in reversed(children)}", "for node in children}",
           (ROUNDS_TEST,)),
    Mutant("trace-typical-as-exact", ROUNDS, "params.greedy or tree.typical is not None:", "params.greedy:",
           (ROUNDS_TEST,)),
    Mutant("repair-norm-of-all-states-keeps-its-order", "modules/formats/readings.py",
           '{"fc.weight": 1, "input_norm.weight": 0}', '{"fc.weight": 1}', (READINGS_TEST,)),
    Mutant("repair-norms-of-states-keep-their-order", "modules/formats/readings.py",
           'state[f"fc_norm.{len(own) - 1 - number}.weight"]', 'state[f"fc_norm.{number}.weight"]', (READINGS_TEST,)),
]  # fmt: skip

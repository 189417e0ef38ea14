"""Mutants of what `draftsmith refresh` says of a head before and after."""

from __future__ import annotations

from mutants.mutant import Mutant

SAYS, RUNS, MOVED = "eval/refresh.py", "launch/refresh.py", "data/heads/moved.py"
DRAFTER, HEAD = "train/drafter.py", "modules/drafters/eagle3/head.py"
ON_REAL_SHAPES = "test_an_eagle3_head_of_the_embedded_target"
EAGLE3_TEST = "tests/train/eagle3_test.py::test_a_head_is_fine_tuned_with_its_own_layers_and_vocabulary"
SAYS_TEST, RUNS_TEST = "tests/eval/refresh_test.py", "tests/train/refresh_test.py"

MUTANTS = [
    Mutant("refresh-worse-by-the-wrong-end", SAYS, "    if high < 1:", "    if low < 1:", (SAYS_TEST,)),
    Mutant("refresh-any-gain-counts", SAYS, "    if high < 1 + worth:", "    if high < 1:", (SAYS_TEST,)),
    Mutant("refresh-worth-it-above-one", SAYS, 'if low > 1 + worth else "cannot tell"', 'if low > 1 else "cannot tell"',
           (SAYS_TEST,)),
    Mutant("refresh-sure-of-few-prompts", SAYS, "and prompts >= LEAST_PROMPTS", "and prompts > LEAST_PROMPTS",
           (SAYS_TEST,)),
    Mutant("refresh-better-at-one-temperature-decides", SAYS, '("worse", "worth it", "cannot tell"',
           '("worth it", "worse", "cannot tell"', (SAYS_TEST,)),
    Mutant("refresh-depth-of-every-draft", SAYS, 'and step["num_accepted"] >= depth - 1]', "]", (SAYS_TEST,)),
    Mutant("refresh-depth-of-drafts-cut-short", SAYS, 'if step["num_drafted"] >= depth and', "if", (SAYS_TEST,)),
    Mutant("refresh-counts-prompts-of-the-data", SAYS, 'if row["prompt"] not in seen]', "]", (SAYS_TEST,)),
    Mutant("refresh-gain-upside-down", SAYS, "drawn.interval(lambda: drawn.tau(second) / drawn.tau(first))",
           "drawn.interval(lambda: drawn.tau(first) / drawn.tau(second))", (SAYS_TEST,)),
    Mutant("refresh-full-learning-rate", RUNS, 'known["lr"].default)) * share', 'known["lr"].default))', (RUNS_TEST,)),
    Mutant("refresh-head-keeps-its-identity", MOVED, '        "target": identity,\n        "models"',
           '        "target": head_config(directory).get("target"),\n        "models"', (RUNS_TEST,)),
    Mutant("refresh-any-tokenizer", MOVED, "if known[name] != ours[name]", "if not known[name]", (RUNS_TEST,)),
    Mutant("refresh-lm-head-of-the-old-target", DRAFTER, "        head.go_on(weights)\n", "",
           (f"{RUNS_TEST}::{ON_REAL_SHAPES}", EAGLE3_TEST)),
    Mutant("refresh-forgets-whose-lm-head-it-is", MOVED, "list(of_target(directory))", "[]",
           (f"{RUNS_TEST}::{ON_REAL_SHAPES}",)),
    Mutant("refresh-trained-lm-head-is-the-targets", HEAD, "        if self.of_target:\n", "        if True:\n",
           (EAGLE3_TEST,)),
    Mutant("refresh-lm-head-stays-the-targets-when-trained", HEAD, "            self.of_target = ()\n",
           "            pass\n", (EAGLE3_TEST,)),
    Mutant("refresh-imported-lm-head-of-other-ids", "data/exchange/import_head.py",
           'lm_head[state["d2t"]] if "d2t" in state', 'lm_head[: len(state["d2t"])] if "d2t" in state',
           ("tests/data/exchange/eagle3_test.py::test_an_import_knows_whether_the_lm_head_is_the_targets",)),
    Mutant("refresh-any-depth", MOVED, "> target.info.num_layers", "> 99", (RUNS_TEST,)),
]  # fmt: skip

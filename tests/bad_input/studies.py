"""What studies and runs that rest on other runs may be given."""

from __future__ import annotations

from bad_input.row import Row

BENCH = "eval bench --target {target} --prompts {chats} --limit 1 --repeats 1 --output {out} "

ROWS = [
    Row("bench: costs of no run", f"{BENCH}--costs ./nosuch", ("costs", "nosuch", "results.json")),
    Row("bench: costs of a model", f"{BENCH}--costs {{target}}", ("costs", "results.json")),
    Row("bench: costs of a run that measured none", f"{BENCH}--costs {{bench}}", ("costs", "without measured costs")),
]

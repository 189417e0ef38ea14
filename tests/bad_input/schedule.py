"""Runs and costs from which no schedule follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from bad_input.files import changed, spoilt
from bad_input.row import Ground, Row

SCHEDULE = "eval schedule {bench} --output {out} "
GOOD = {"1": {"0": 0.01, "2": 0.012}, "8": {"0": 0.012, "2": 0.02}}


def costs(content: object) -> Callable[[Ground, Path], dict[str, object]]:
    """A file of times: `{costs}`."""

    def make(ground: Ground, to: Path) -> dict[str, object]:
        path = to / "costs.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return {"costs": path}

    return make


GIVEN = costs({"seconds": GOOD})
ROWS = [
    Row("no run", "eval schedule {target} --costs {costs} --output {out}", ("target", "results.json"), GIVEN),
    Row("a run of another kind", "eval schedule {d} --costs ./nosuch.json --output {out}", ("kind study",),
        spoilt("bench", "results.json", changed(meta={"kind": "study"}))),
    Row("no such method", SCHEDULE + "--costs {costs} --method spec:k=3", ("method", "spec:k=3", "spec:k=2"), GIVEN),
    Row("a method that drafts nothing", SCHEDULE + "--costs {costs} --method ar", ("method", "ar", "spec:k=2"), GIVEN),
    Row("no costs", SCHEDULE, ("--costs",)),
    Row("no such costs", SCHEDULE + "--costs ./nosuch.json", ("costs", "nosuch.json")),
    *(
        Row(f"costs: {name}", SCHEDULE + "--costs {costs}", ("costs.json", *says), costs(content))
        for name, content, says in [
            ("no JSON", "{", ("damaged",)),
            ("no seconds", {"times": GOOD}, ("no seconds",)),
            ("seconds of text", {"seconds": {"1": {"0": "fast"}}}, ("seconds.1.0", "fast")),
            ("not with one request", {"seconds": {"8": GOOD["8"]}}, ("8 requests", "1, and more")),
            ("no requests at all", {"seconds": {}}, ("no requests",)),
            ("without a round of no drafts", {"seconds": {"1": {"2": 0.1, "3": 0.2}}}, ("1 requests", "0 and")),
            ("a million requests", {"seconds": {**GOOD, "1000000": GOOD["8"]}}, ("1000000 requests", "4,096")),
            ("a name that is no number", {"seconds": {**GOOD, "many": GOOD["8"]}}, ("many requests",)),
            ("no time", {"seconds": {"1": {"0": 0.0, "2": 0.1}}}, ("0.0", "1 requests")),
        ]
    ),
]  # fmt: skip

"""Runs and costs from which no schedule follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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
    Row("no such method", SCHEDULE + "--costs {costs} --method spec:k=3", ("method", "spec:k=3", "spec:k=2"), GIVEN),
    Row("a method that drafts nothing", SCHEDULE + "--costs {costs} --method ar", ("method", "ar", "spec:k=2"), GIVEN),
    Row("no costs", SCHEDULE, ("--costs",)),
    Row("llama.cpp without a GGUF file", SCHEDULE + "--engine llamacpp --target {target}", ("target", "GGUF")),
    *(
        Row(f"costs: {name}", SCHEDULE + "--costs {costs}", ("costs.json", *says), costs(content))
        for name, content, says in [
            ("no JSON", "{", ("damaged",)),
            ("no seconds", {"times": GOOD}, ("no seconds",)),
            ("not with one request", {"seconds": {"8": GOOD["8"]}}, ("8 requests", "1, and more")),
            ("a million requests", {"seconds": {**GOOD, "1000000": GOOD["8"]}}, ("1000000 requests", "4,096")),
        ]
    ),
]  # fmt: skip

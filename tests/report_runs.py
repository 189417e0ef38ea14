"""A benchmark with traced rounds, made by hand for the report, with text that would run if it were not escaped."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

HOSTILE = "<script>alert(1)</script>"
METHODS = ("ar", "spec:k=3", "eagle-tree:nodes=4:depth=2:topk=2")
TASKS = ("code", HOSTILE)
TOKENS = {1: "def", 2: " x", 3: "\n", 4: HOSTILE, 5: " a", 6: " b", 7: " c", 8: "</script><!--"}

META = {
    "kind": "bench",
    "command": "draftsmith eval bench --target embedded:target --methods 'ar,spec:k=3'",
    "date": "2026-11-21T00:00:00+00:00",
    "seed": 0,
    "settings": {"target": "embedded:target", "head": "embedded:draft", "data": "p.jsonl",
                 "methods": ",".join(METHODS), "top_k": 0, "top_p": 1.0, "dtype": "float32", "device": "cpu",
                 "loader": "auto", "num_threads": 1, "batch_size": 1, "max_new_tokens": 64, "ignore_eos": False,
                 "repeats": 1, "limit": 2},
    "target": {"config": "c0ffee", "tokenizer": "70c3"},
    "models": {"draft": {"config": "d4af7"}},
    "prompts": {"source": "p.jsonl", "count": 2, "sha256": "ab" * 32},
    "versions": {"torch": "2.13.0", "python": "3.11"},
    "hardware": {"cpu": "a CPU", "cpu_count": 2, "torch_threads": 1, "platform": "Linux"},
    "clock": "cpu",
    "step_costs": {},
}  # fmt: skip

# One answer of the chain and one of the tree; `kinds` is what a reader of the definitions says.
CHAIN: list[dict[str, Any]] = [
    {"emitted": [1], "prefill": True, "kinds": ["alone"]},
    {"emitted": [2, 3, 4], "drafted": [2, 3, 5], "parents": [-1, 0, 1], "accepted": [0, 1], "next_token": 4,
     "q": [0.9, 0.8, 0.123456],
     "kinds": ["accepted", "accepted", "correction"]},
    {"emitted": [5, 6, 7], "drafted": [5, 6], "parents": [-1, 0], "accepted": [0, 1], "next_token": 7,
     "q": [0.9, 0.8], "kinds": ["accepted", "accepted", "bonus"]},
    {"emitted": [6], "drafted": [], "parents": [], "accepted": [], "next_token": 6, "kinds": ["alone"]},
    {"emitted": [5, 6], "drafted": [5, 6, 7], "parents": [-1, 0, 1], "accepted": [0, 1, 2], "next_token": 1,
     "kinds": ["accepted", "accepted"]},
]  # fmt: skip
TREE: list[dict[str, Any]] = [
    {"emitted": [1], "prefill": True, "kinds": ["alone"]},
    {"emitted": [2, 3, 4], "drafted": [2, 5, 3, 6], "parents": [-1, -1, 0, 1], "accepted": [0, 2], "next_token": 4,
     "kinds": ["accepted", "accepted", "bonus"]},
    {"emitted": [5, 8], "drafted": [5, 6, 7, 2], "parents": [-1, -1, 0, 0], "accepted": [0], "next_token": 8,
     "kinds": ["accepted", "correction"]},
    {"emitted": [7], "drafted": [5, 6], "parents": [-1, -1], "accepted": [], "next_token": 7, "kinds": ["correction"]},
]  # fmt: skip
ALONE: list[dict[str, Any]] = [
    {"emitted": [1], "prefill": True, "kinds": ["alone"]},
    {"emitted": [4], "drafted": [], "parents": [], "accepted": [], "next_token": 4, "kinds": ["alone"]},
]
ROUNDS = dict(zip(METHODS, (ALONE, CHAIN, TREE), strict=True))


def bench_run(directory: Path, **settings: Any) -> Path:
    """A finished benchmark at two temperatures. settings: that replace those of META; `methods` a list."""
    directory.mkdir(parents=True)
    methods = settings.pop("methods", METHODS)
    meta = copy.deepcopy(META)
    meta["settings"] |= settings
    rows = [_row(method, temperature) for temperature in (0.0, 1.0) for method in methods]
    (directory / "results.json").write_text(json.dumps({"meta": meta, "methods": rows}))
    lines = []
    for temperature in (0.0, 1.0):
        for method in methods:
            for number, task in enumerate(TASKS):
                base = {"method": method, "temperature": temperature, "prompt": number, "id": f"{task}-{number}"}
                base |= {"task": task, "turn": 1}
                for index, item in enumerate(ROUNDS[method]):
                    line = {key: value for key, value in item.items() if key != "kinds"}
                    times = {
                        "target_s": 0.0123,
                        **({} if item.get("prefill") else {"draft_s": 0.004, "draft_calls": 2}),
                    }
                    lines.append(json.dumps({**base, "round": index, **line, **times}))
    (directory / "trace.jsonl").write_text("\n".join(lines) + "\n")
    prompts = {f"{number}/1": f"{HOSTILE} {number}" for number in range(len(TASKS))}
    texts = {"tokens": {str(token): text for token, text in TOKENS.items()}, "prompts": prompts}
    (directory / "texts.json").write_text(json.dumps(texts))
    return directory


def _row(method: str, temperature: float) -> dict[str, Any]:
    gain = 1 + METHODS.index(method) / 2 - temperature / 4
    part = {"speedup": gain, "tau": 2 * gain, "tokens_per_s": 100 * gain, "prompts": 1}
    whole = {**part, "prompts": 2, "tokens": 20, "num_target_calls": 9, "num_draft_tokens": 15, "num_accepted": 11}
    whole |= {"discard_rate": 0.2, "verification_rate": 0.45, "matches_ar": True if temperature == 0 else None}
    whole |= {"acceptance_rate": 11 / 15, "copied_prompt": 0.1, "copied_answer": 0.2, "distinct_4grams": 0.9}
    whole |= {"macro_speedup": gain, "macro_tau": 2 * gain, "num_differing": 0}
    whole |= {"speedup_ci95": [gain - 0.1, gain + 0.1], "tau_ci95": [2 * gain - 0.2, 2 * gain + 0.2]}
    if method != "ar":
        ends = ((0, 256, "below 256", 2.5), (256, 512, "256+", 2.0), (512, 1024, "512+", 1.5))
        whole["accepted_by_place"] = [0.5, 0.25]
        whole["by"] = {"context": [
            {"name": name, "from": low, "to": high, "rounds": 40 if low < 512 else 9, "tau": tau, "tau_ci95": None,
             "acceptance_rate": 0.5}
            for low, high, name, tau in ends
        ]}  # fmt: skip
    whole["by"] = {**whole.get("by", {}), "task": [{"name": task, **part} for task in TASKS]}
    return {"method": method, "temperature": temperature, **whole}

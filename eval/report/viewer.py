"""A benchmark's trace for the page's viewer: answers, round by round, within a number of bytes.

Kinds of emitted tokens, which the viewer colors:
    accepted: a drafted token that the target accepted.
    bonus: the target's own token after a fully accepted draft.
    correction: the target's own token in place of a rejected one.
    alone: the target's own token where nothing was drafted, also the prefill's.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftsmith.eval.bench.trace import TEXTS, TRACE
from draftsmith.eval.report.runs import uses_head
from draftsmith.modules.pretrained.reading import read_lines, read_object

# Numbers per drafted token in a trace line; the page rounds them.
PER_NODE = ("q", "entropy", "head", "value", "accept_prob")
AGAIN = "Delete it, and measure again with --traces."
Prompt = tuple[int, int]  # number in the run, and turn; ids of several files may be equal


def kinds(line: Mapping[str, Any]) -> list[str]:
    """Return the kind of each emitted token of a round."""
    emitted, path = line["emitted"], list(line.get("accepted", ()))
    if line.get("prefill") or not line.get("drafted"):
        return ["alone"] * len(emitted)
    found = ["accepted"] * min(len(path), len(emitted))
    if len(emitted) > len(found):
        last = path[-1] if path else -1
        found.append("correction" if last in line["parents"] else "bonus")
    return found


def viewer_data(directory: Path, max_bytes: int) -> dict[str, Any] | None:
    """Return what the page embeds of a run's trace; None if rounds were not traced.

    Prompts are taken from the tasks in turn, with all their methods, as long as they fit into `max_bytes`. The result
    has `methods`, `first` (the number of the one that the page opens: a trained head's, if there is one), `prompts`
    (id, task, turn, text), `answers` (method, temperature, prompt, rounds), `tokens` (id -> text) and `total`, the
    number of traced prompts.
    """
    if not (directory / TRACE).exists() or not (directory / TEXTS).exists():
        return None
    sizes: dict[Prompt, int] = {}
    named: dict[Prompt, dict[str, Any]] = {}
    for prompt, line in _lines(directory):
        named[prompt] = {"id": line["id"], "task": line["task"] or "", "turn": prompt[1]}
        sizes[prompt] = sizes.get(prompt, 0) + len(json.dumps(_round(line), separators=(",", ":"))) + 1
    chosen = shown_prompts(sizes, {prompt: entry["task"] for prompt, entry in named.items()}, max_bytes)
    answers: dict[tuple[str, float, Prompt], list[dict[str, Any]]] = {}
    used: set[int] = set()
    for prompt, line in _lines(directory):
        if prompt in chosen:
            key = (line["method"], float(line["temperature"]), prompt)
            answers.setdefault(key, []).append(_round(line))
            used |= {*line["emitted"], *line.get("drafted", ()), line.get("next_token")} - {None}
    methods = list(dict.fromkeys(method for method, _, _ in answers))
    texts = read_object(directory / TEXTS, {"prompts": dict, "tokens": dict}, AGAIN)
    asked = texts["prompts"]
    first = next((number for number, method in enumerate(methods) if uses_head(method)), min(1, len(methods) - 1))
    return {
        "methods": methods,
        "first": first,
        "prompts": [{**named[prompt], "text": asked.get(f"{prompt[0]}/{prompt[1]}", "")} for prompt in chosen],
        "answers": [
            {
                "method": methods.index(method),
                "temperature": temperature,
                "prompt": chosen.index(prompt),
                "rounds": rounds,
            }
            for (method, temperature, prompt), rounds in answers.items()
        ],
        "tokens": {token: texts["tokens"].get(str(token), f"<{token}>") for token in sorted(used)},
        "total": len(sizes),
    }


def shown_prompts(sizes: Mapping[Prompt, int], tasks: Mapping[Prompt, str], max_bytes: int) -> list[Prompt]:
    """Choose prompts that fit, the first of every task before the second of any."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in sizes:
        by_task.setdefault(tasks[prompt], []).append(prompt)
    chosen, left = [], max_bytes
    for prompt in itertools.chain.from_iterable(itertools.zip_longest(*by_task.values())):
        if prompt is not None and sizes[prompt] <= left:
            chosen.append(prompt)
            left -= sizes[prompt]
    return chosen


def _lines(directory: Path) -> Iterator[tuple[Prompt, dict[str, Any]]]:
    for line in read_lines(directory / TRACE, {}, AGAIN):
        yield (line["prompt"], line["turn"]), line


def _round(line: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten a trace line for the page: times in milliseconds, no parents for a chain, nothing empty."""
    found = {"emitted": line["emitted"], "kinds": kinds(line), "target_ms": _short(line.get("target_s"), 1000)}
    if line.get("prefill"):
        return {**found, "prefill": True}
    if not line.get("drafted"):
        return found
    found |= {"drafted": line["drafted"], "accepted": line["accepted"], "next": line.get("next_token")}
    found |= {"draft_ms": _short(line.get("draft_s"), 1000), "draft_calls": line.get("draft_calls")}
    if list(line["parents"]) != list(range(-1, len(line["drafted"]) - 1)):
        found["parents"] = line["parents"]
    return found | {key: [_short(value) for value in line[key]] for key in PER_NODE if line.get(key)}


def _short(value: float | None, scale: float = 1) -> float | None:
    return None if value is None else float(f"{scale * value:.3g}")

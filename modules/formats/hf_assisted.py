"""Draft models for plain transformers, whose settings travel in `generation_config.json` of the DRAFT.

`generate(assistant_model=draft)` reads them there (transformers 5.23.0, generation/candidate_generator.py). Its
defaults are 20 drafted tokens a round and a confidence threshold of 0.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.modules.types import InputError

NAME = "hf-assisted"  # of the format on the command line
FIELDS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


@dataclass(frozen=True)
class Tuning:
    """Settings of a draft model.

    k: most drafted tokens of a round. threshold: a round ends after a drafted token of lower probability; 0 never.
    measured: source of the settings, for the model card.
    """

    k: int
    threshold: float = 0.0
    measured: str = "chosen by hand"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError("k", self.k, "1 or more drafted tokens", "Raise it.")
        if not 0 <= self.threshold < 1:
            raise InputError("threshold", self.threshold, "0 (off) or a probability below 1", "Correct it.")


def generation_config(fields: Mapping[str, Any], tuning: Tuning) -> dict[str, Any]:
    """Return the content of `generation_config.json` with this tuning; all other fields are unchanged."""
    values = (tuning.k, "constant", float(tuning.threshold))
    return {**fields, **dict(zip(FIELDS, values, strict=True))}


def choose_tuning(results: Mapping[str, Any], draft: Mapping[str, str]) -> Tuning:
    """Choose the fastest setting that was measured for this draft, in transformers itself (method `hf-assisted`).

    results: `results.json` of `eval bench`. draft: identity of the draft model.

    Raises:
        InputError: results of another draft, or without such a method.
    """
    meta, rows = results["meta"], results["methods"]
    measured = meta.get("models", {}).get("draft")
    if measured != dict(draft):
        found = f"measurements with the draft {measured}"
        raise InputError("results", found, f"the draft {dict(draft)}", "Measure with the draft that is exported.")
    fitting = [row for row in rows if row["method"].partition(":")[0] == NAME]
    if not fitting:
        remedy = f"Run eval bench with --methods {NAME}:k=5,{NAME}:k=20:t=0.4."
        raise InputError("results", ", ".join(row["method"] for row in rows), f"a row of {NAME}", remedy)
    best = max(fitting, key=lambda row: row["tokens_per_s"])
    settings, prompts = meta["methods"][best["method"]], meta.get("prompts") or {}
    where = f"{prompts.get('count')} prompts of {prompts.get('source')} ({meta.get('date')})"
    source = f"{best['method']}, {best['tokens_per_s']:.1f} tokens/s, the fastest measured on {where}"
    return Tuning(settings["k"], settings.get("t", 0.0), source)


def serve(target: str, directory: str) -> str:
    """Return lines of Python that use a directory of draft and settings."""
    return "\n".join(
        (
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"tokenizer = AutoTokenizer.from_pretrained({target!r})",
            f'target = AutoModelForCausalLM.from_pretrained({target!r}, dtype="auto")',
            f'draft = AutoModelForCausalLM.from_pretrained({directory!r}, dtype="auto")',
            'inputs = tokenizer("def add(a, b):", return_tensors="pt")',
            "output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)",
            "print(tokenizer.decode(output[0]))",
        )
    )

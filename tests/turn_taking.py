"""Conversations of several turns, and how tests have them asked and answered."""

from __future__ import annotations

from pathlib import Path

from draftsmith.data import prompts, responses
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows

TARGET = "embedded:draft-small"  # a trained model of one layer: it ends its answers, and is fast
FUNCTIONS = [
    "def area(width: int, height: int) -> int:\n    return width * height",
    "def add(first, second):\n    return first + second",
    "def total(values: list) -> int:\n    s = 0\n    for value in values:\n        s += value\n    return s",
]
WISHES = ["Remove the type hints:\n\n", "Add a docstring:\n\n", "Rename the function to work:\n\n"]
USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
MAX_NEW = 60


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def conversation(number: int) -> list[dict[str, str]]:
    """One to three turns, with answers that the target would not give; some begin with a system message."""
    messages = chat((SYSTEM, "Be brief.")) if number % 4 == 3 else []
    for turn in range(1 + number % 3):
        wish = WISHES[(number + turn) % 3] + FUNCTIONS[(number // 3 + turn) % 3]
        messages += chat((USER, wish), (ASSISTANT, f"As you wish, {turn}."))
    return messages


NUM_ROWS = 7
REWRITES = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{{ m.content.split('\n')[1:] | join('\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_prompts(source: Path, output: Path, **settings) -> Path:
    return prompts.run(prompts.PromptsConfig(str(source), TARGET, output, **settings))


def make_responses(asked: Path, output: Path, **settings) -> Path:
    own = {"temperature": 0.0, "max_new_tokens": MAX_NEW, "rows_per_shard": 3, "batch_size": 2, "num_threads": 1}
    return responses.run(responses.ResponsesConfig(asked, TARGET, output, **{**own, **settings}))


def rows_of(directory: Path) -> list[dict]:
    return Rows(directory, Manifest.read(directory)).read(0, 99)


def counts_of(directory: Path) -> dict[str, int]:
    return Manifest.read(directory).counts

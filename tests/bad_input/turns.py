"""Turns that cannot be asked as they are told, and prompts that tau cannot be measured on."""

from __future__ import annotations

import json
from pathlib import Path

from bad_input.row import Ground, Row

from draftsmith.launch.cli import main

TURNS = [
    {"role": "user", "content": "Explain."},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Why?"},
]


def conversations(ground: Ground, tmp: Path) -> dict[str, object]:
    """Prompts of two turns, with a template that is a copy of the tokenizer's own and then disappears."""
    source, template, made = tmp / "chats.jsonl", tmp / "template.jinja", tmp / "made"
    source.write_text(json.dumps({"messages": TURNS}) + "\n")
    template.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>")
    words = f"data prompts --source {source} --target {ground.target} --chat-template {template} --output {made}"
    assert main(words.split()) == 0
    template.rename(tmp / "moved.jinja")
    (tmp / "other.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return {"made": made, "source": source}


def templates(ground: Ground, tmp: Path) -> dict[str, object]:
    """Templates that lose the user's words, and that mark them as the assistant's."""
    said = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (parts := tmp / "parts.jinja").write_text(said.replace("m.content", "m.content[0].text"))
    (tags := tmp / "tags.jinja").write_text("{% generation %}" + said + "{% endgeneration %}")
    return {"parts": parts, "tags": tags}


PROMPTS = "data prompts --source {chats} --target {target} --output {out} "
ASK = "data responses --prompts {made} --target {target} --output {out}"
TRAIN = "train eagle --data {features} --target {target} --output {out} --max-steps 1"
ROWS = [
    Row("turns of no kind", "data prompts --source {chats} --target {target} --output {out} --turns middle",
        ("turns", "middle")),
    Row("supervised and only the last turn",
        "data prompts --source {chats} --target {target} --output {out} --turns last --supervised", ("turns", "last")),
    Row("a template that reads lists of parts only", PROMPTS + "--chat-template {parts}",
        ("parts.jinja", "the user's words", "--chat-template"), templates),
    Row("tags around the user's words", PROMPTS + "--supervised --chat-template {tags}",
        ("chat_template", "the assistant's words alone", "--chat-template"), templates),
    Row("the prompts' template is gone", ASK, ("template.jinja", "--chat-template"), conversations),
    Row("another template for later turns", ASK + " --chat-template {tmp}/other.jinja", ("chat_template",),
        conversations),
    Row("no such template for later turns", ASK + " --chat-template {tmp}/nosuch", ("nosuch",), conversations),
    Row("later turns in the bench by another template",
        "eval bench --target {target} --methods ar --prompts {made} --output {out}", ("prompts", "template"),
        conversations),
    Row("end tokens that a server cannot ignore",
        "data responses --prompts {prompts} --target {target} --output {out} --engine openai --server.dialect openai "
        "--ignore-eos", ("ignore_eos",)),
    Row("no llama.cpp at the address",
        "data responses --prompts {prompts} --target {target} --output {out} --engine openai --server.dialect llamacpp "
        "--server.url http://127.0.0.1:1/v1", ("server", "127.0.0.1:1/props", "--server.url")),
    Row("tau on features", TRAIN + " --tau-data {features}", ("features", "prompts")),
    Row("tau on nothing", TRAIN + " --tau-data ./nosuch", ("nosuch",)),
]  # fmt: skip

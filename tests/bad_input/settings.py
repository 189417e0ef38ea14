"""Settings that no command may take: out of range, of another type, unknown, or missing."""

from __future__ import annotations

from bad_input.row import Row

BENCH = "eval bench --target {target} --draft {draft} --prompts {chats} --output {out} "
EAGLE = "train eagle --data {features} --target {target} --output {out} "

ROWS = [
    Row("unknown setting", BENCH + "--metods ar", ("metods", "--methods")),
    Row("no number", BENCH + "--repeats many", ("repeats", "many")),
    Row("a missing setting", "data responses --prompts {prompts} --output {out}", ("target",)),
]

DECODE, RESPONSES = "decode Hi --target {target} --method ar ", "data responses --prompts {prompts} --target {target} "
ROWS += [
    Row("a negative seed", EAGLE + "--seed -1", ("--seed", "-1")),
    Row("a rate that is NaN", EAGLE + "--lr nan", ("--lr", "finite")),
    Row("a temperature that is NaN", DECODE + "--temperature nan", ("--temperature", "finite")),
    Row("a key that YAML reads as true", "decode Hi --target {target} --config {yaml}", ("key", "True", "c.yaml"),
        lambda ground, to: {"yaml": to / "c.yaml", "x": (to / "c.yaml").write_text("server:\n  true: 2")}),
]  # fmt: skip
ROWS += [
    Row("a billion Medusa heads",
        "train medusa --plan --data x --output y --target {target} --num-heads 1000000000", ("num_heads", "1 to 128")),
]  # fmt: skip
ROWS += [
    Row("threads without end", BENCH + "--num-threads 1000000000", ("--num-threads", "1024")),
]

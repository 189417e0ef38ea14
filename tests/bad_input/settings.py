"""Settings that no command may take: out of range, of another type, unknown, or missing."""

from __future__ import annotations

from bad_input.row import Row

BENCH = "eval bench --target {target} --draft {draft} --prompts {chats} --output {out} "
EAGLE = "train eagle --data {features} --target {target} --output {out} "

ROWS = [
    Row("unknown setting", BENCH + "--metods ar", ("metods", "--methods")),
    Row("no number", BENCH + "--repeats many", ("repeats", "many")),
    Row("a missing setting", "data responses --prompts {prompts} --output {out}", ("target",)),
    Row("negative temperature", "decode Hi --target {target} --method ar --temperature -1", ("temperature", "-1")),
]

SEEDED = [
    BENCH,
    "eval lossless --target {target} --draft {draft} --prompts {chats} --output {out} ",
    "data responses --prompts {prompts} --target {target} --output {out} ",
    "data acceptance --responses {responses} --target {target} --draft {draft} --output {out} ",
    EAGLE,
    "train acceptance --data {labels} --draft {draft} --output {out} ",
    "decode Hi --target {target} --method ar ",
]
ROWS += [
    Row(f"seed {seed} of {words.split(' --')[0]}", words + f"--seed {seed}", ("--seed", str(seed)))
    for words in SEEDED
    for seed in (2**70, -1)
]
ROWS += [
    Row(f"{name} {number} of {words.split(' --')[0]}", words + f"--{name} {number}", (f"--{name}", "finite"))
    for words, name in [
        (EAGLE, "lr"), (EAGLE, "weight-decay"), (EAGLE, "clip"), (EAGLE, "noise"), (EAGLE, "feature-weight"),
        (SEEDED[-1], "temperature"), (SEEDED[2], "top-p"), (BENCH, "temperature"),
    ]
    for number in ("nan", "-inf")
]  # fmt: skip
ROWS += [
    Row(f"a key that YAML reads as {key}", "decode Hi --target {target} --config {yaml}", ("key", key, "c.yaml"),
        lambda ground, to, text=text: {"yaml": to / "c.yaml", "x": (to / "c.yaml").write_text(text)})
    for key, text in {"1": "1: 2", "None": "null: 2", "True": "server:\n  yes: 2"}.items()
]  # fmt: skip
ROWS += [
    Row("a billion Medusa heads", "plan medusa --target {target} --num-heads 1000000000", ("num_heads", "1 to 128")),
    Row("a billion layers", "plan eagle --target {target} --num-layers 1000000000", ("num_layers", "1,024")),
    Row("a billion blocks", "train acceptance --data {labels} --draft {draft} --output {out} --num-blocks 1000000000",
        ("num_blocks", "1000000000")),
    Row("fewer than no drafted tokens", "export --format vllm --head {eagle} --target {target} --output {out} "
        "--num-drafted -1", ("num_drafted", "-1")),
]  # fmt: skip
ROWS += [
    Row("a number as text", EAGLE + "--lr much", ("--lr", "much", "float")),
    Row("threads without end", BENCH + "--num-threads 1000000000", ("--num-threads", "1024")),
    Row("a batch beyond 64 bits", EAGLE + f"--batch-size {2**70}", ("--batch-size", "integer")),
    Row("a beta that is not finite", EAGLE + "--betas [.nan,0.9]", ("--betas", "finite")),
]

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

DECODE, RESPONSES = "decode Hi --target {target} --method ar ", "data responses --prompts {prompts} --target {target} "
ROWS += [
    Row("a negative seed", EAGLE + "--seed -1", ("--seed", "-1")),
    Row("a seed beyond 64 bits", BENCH + f"--seed {2**70}", ("--seed", str(2**70))),
    Row("a rate that is NaN", EAGLE + "--lr nan", ("--lr", "finite")),
    Row("a weight that is infinite", EAGLE + "--feature-weight -inf", ("--feature-weight", "finite")),
    Row("a temperature that is NaN", DECODE + "--temperature nan", ("--temperature", "finite")),
    Row("a top-p that is infinite", RESPONSES + "--output {out} --top-p -inf", ("--top-p", "finite")),
    Row("a key that YAML reads as true", "decode Hi --target {target} --config {yaml}", ("key", "True", "c.yaml"),
        lambda ground, to: {"yaml": to / "c.yaml", "x": (to / "c.yaml").write_text("server:\n  yes: 2")}),
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

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

"""Settings of the certificate that say nothing, or more than can be tested."""

from __future__ import annotations

from bad_input.row import Row

LOSSLESS = "eval lossless --target {target} --draft {draft} --prompts {chats} --output {out} "

ROWS = [
    Row(f"{name} {value}", LOSSLESS + f"--{name} {value}", (name.replace("-", "_"), value))
    for name, value in [
        ("bias", "0"), ("bias", "1"), ("power", "1"), ("power", "-0.5"), ("alpha", "0"), ("alpha", "2"),
        ("batch-size", "0"), ("sampled-tokens", "1"), ("sampled-prompts", "-1"), ("max-gap", "-1"),
        ("temperature", "0"), ("limit", "0"), ("max-new-tokens", "0"),
    ]
]  # fmt: skip
ROWS += [
    Row("a method of transformers", LOSSLESS + "--methods hf", ("methods", "hf")),
    Row("a method without its model", LOSSLESS + "--methods eagle", ("eagle",)),
    Row("a bias that no bet grows on", LOSSLESS + "--bias 1e-9 --limit 1 --max-new-tokens 2 --methods ar", ("bias",)),
]

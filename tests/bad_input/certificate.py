"""Settings of the certificate that say nothing, or more than can be tested."""

from __future__ import annotations

from bad_input.row import Row

LOSSLESS = "eval lossless --target {target} --draft {draft} --prompts {chats} --output {out} "

ROWS = [
    Row(f"{name} {value}", LOSSLESS + f"--{name} {value}", (name.replace("-", "_"), value))
    for name, value in [
        ("alpha", "2"), ("batch-size", "0"), ("sampled-tokens", "-1"), ("temperature", "0"),
        ("limit", "0"), ("max-new-tokens", "1"),
    ]
]  # fmt: skip
ROWS += [
    Row("a method of transformers", LOSSLESS + "--methods hf", ("methods", "hf")),
    Row("a method without its model", LOSSLESS + "--methods eagle", ("eagle",)),
]

CERTIFY = "eval certify --target {target} --output {out} --answers "
ROWS += [
    Row("certify: alpha 2", CERTIFY + "{responses} --alpha 2", ("alpha", "2")),
    Row("certify: no answers", CERTIFY + "{prompts}", ("prompts", "responses")),
]

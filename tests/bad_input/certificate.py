"""Settings of the certificate that say nothing, or more than can be tested."""

from __future__ import annotations

from bad_input.row import Row

METHODS = "eval certify --target {target} --draft {draft} --prompts {chats} --output {out} "

ROWS = [
    Row(f"{name} {value}", METHODS + f"--{name}={value}", (name.replace("-", "_"), value))
    for name, value in [
        ("alpha", "2"), ("batch-size", "0"), ("sampled-tokens", "-1"), ("temperature", "0"),
        ("limit", "-1"), ("max-new-tokens", "1"),
    ]
]  # fmt: skip
ROWS += [
    Row("a method of transformers", METHODS + "--methods hf", ("methods", "hf")),
    Row("a method without its model", METHODS + "--methods eagle", ("eagle",)),
]

CERTIFY = "eval certify --target {target} --output {out} --answers "
ROWS += [
    Row("certify: alpha 2", CERTIFY + "{responses} --alpha 2", ("alpha", "2")),
    Row("certify: nothing to certify", "eval certify --target {target} --output {out}", ("answers", "--prompts")),
    Row("certify: no answers", CERTIFY + "{prompts}", ("prompts", "responses")),
]

"""Files of prompts as they are found, and servers that are none."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

from bad_input.row import Ground, Row

PROMPTS = "data prompts --source {file} --target {target} --output {out} "
BENCH = "eval bench --target {target} --draft {draft} --methods ar --output {out} "
SERVER = "data responses --engine openai --prompts {prompts} --target {target} --output {out} --server.retries 0 "
GOOD = b'{"id": "a", "prompt": "Hi"}\n'

Make = Callable[[Ground, Path], dict[str, object]]


def file(content: bytes, name: str = "x.jsonl") -> Make:
    def make(ground: Ground, folder: Path) -> dict[str, object]:
        (folder / name).write_bytes(content)
        return {"file": folder / name}

    return make


def data_set(ground: Ground, folder: Path) -> dict[str, object]:
    (folder / "set").mkdir()
    (folder / "set" / "train.jsonl").write_bytes(GOOD + b"{")
    return {"file": folder / "set"}


# What is wrong: the file's content and what is said of it.
LINES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "no JSON": (GOOD + b"{", ("x.jsonl, line 2", "not JSON")),
    "half of a surrogate pair": (rb'{"prompt": "\ud800"}', ("x.jsonl, line 1", "surrogate")),
    "a part without text": (
        b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', ("x.jsonl, line 1", "text and has none"),
    ),
    "deep nesting": (GOOD + b"[" * 100_000, ("x.jsonl, line 2", "nested too deeply")),
    "bytes that are no text": (GOOD + b'{"prompt": "caf\xe9"}', ("x.jsonl, line 2", "not UTF-8")),
    "NaN": (GOOD + b'{"prompt": "a", "x": NaN}', ("x.jsonl, line 2", "NaN")),
    "an id twice": (GOOD + GOOD, ("x.jsonl, line 2", "x.jsonl, line 1", "'a'")),
    "a number for a text": (GOOD + b'{"prompt": 5}', ("x.jsonl, line 2", "a number")),
    "a role of nobody": (b'{"messages": [{"role": "robot", "content": "a"}]}', ("x.jsonl, line 1", "robot")),
    "a placeholder of SPEED-Bench": (
        b'{"turns": ["Hi", "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE\\n\\n{question}"]}',
        ("x.jsonl, line 1", "a later turn is a placeholder", "SPEED-Bench's prepare_data.py"),
    ),
    "no user": (b'{"messages": [{"role": "system", "content": "a"}]}', ("x.jsonl, line 1", "no user turn")),
}  # fmt: skip
ROWS = [Row(f"prompts: {what}", PROMPTS, says, file(content)) for what, (content, says) in LINES.items()]
ROWS += [
    Row(f"bench: {what}", BENCH + "--prompts {file}", says, file(content))
    for what, (content, says) in LINES.items()
    if what in ("no JSON", "a placeholder of SPEED-Bench")
]
ROWS += [
    Row("a .json that is not UTF-8", PROMPTS, ("x.json", "not UTF-8"), file(b'[{"prompt": "\xe9"}]', "x.json")),
    Row("a .json nested too deeply", PROMPTS, ("x.json", "nested"), file(b"[" * 100_000, "x.json")),
    Row("a .json cut off", PROMPTS, ("x.json", "not JSON"), file(b'[{"prompt": "a"}, {', "x.json")),
    Row("a .gz cut off", PROMPTS, ("x.jsonl.gz", "unreadable"), file(gzip.compress(GOOD * 9)[:-9], "x.jsonl.gz")),
    Row("a .gz that is none", PROMPTS, ("x.jsonl.gz", "unreadable"), file(GOOD, "x.jsonl.gz")),
    Row("an empty file", PROMPTS, ("x.jsonl", "empty"), file(b"\n")),
    Row("a file of nothing usable", PROMPTS + "--invalid drop", ("dropped 2: invalid 2",), file(b'{"prompt": 1}\n{')),
    Row("columns that nobody knows", PROMPTS, ("columns", "question"), file(b'{"question": "a"}')),
    Row("a data set with a bad row", PROMPTS, ("source", "set"), data_set),
    Row("an artefact as a source", "data prompts --source {prompts} --target {target} --output {out}", ("artefact",)),
    Row("no such split", PROMPTS + "--split dev", ("no rows with split dev",), file(b'{"prompt": "a", "split": "b"}')),
    Row("a split of rows that have none", PROMPTS + "--split dev", ("split", "rows without it"), file(GOOD)),
    Row("tasks: no JSON", BENCH + "--tasks {tmp}", ("x.jsonl, line 2", "not JSON"), file(GOOD + b"{")),
    Row("lossless: an id twice", "eval lossless --target {target} --draft {draft} --methods spec:k=2 --prompts {file} "
        "--output {out}", ("x.jsonl, line 2", "'a'"), file(GOOD + GOOD)),
    Row("a template that fails", PROMPTS + "--chat-template {tmp}/t", ("chat_template", "TypeError"),
        lambda ground, folder: {**file(b"{{ 1 + messages }}", "t")(ground, folder), **file(GOOD)(ground, folder)}),
    Row("a template that says nothing", PROMPTS + "--chat-template {tmp}/t", ("chat_template", "not in it"),
        lambda ground, folder: {**file(b"Hi", "t")(ground, folder), **file(GOOD)(ground, folder)}),
    Row("a template that is no text", PROMPTS + "--chat-template {tmp}/t", ("chat_template", "UTF-8"),
        lambda ground, folder: {**file(b"\xff", "t")(ground, folder), **file(GOOD)(ground, folder)}),
    Row("server: no server", SERVER + "--server.url http://127.0.0.1:9/v1", ("(id row-", "ConnectError")),
    Row("server: no address", SERVER + "--server.url 127.0.0.1:9", ("server.url",)),
    Row("server: a password in the address", SERVER + "--server.url http://me:secret@127.0.0.1:9/v1",
        ("server.url", "found an address with @", "no user, password or query")),
    Row("a password in another address", "data prompts --target {target} --output {out} "
        "--source https://me:secret@127.0.0.1/x.jsonl", ("source: found https://***@127.0.0.1/x.jsonl",)),
    Row("server: a name that no machine has", SERVER + "--server.url http://\u2603.net/v1", ("server.url", "IDNA")),
    Row("server: no whole port", SERVER + "--server.url http://127.0.0.1:99999/v1", ("server.url", "99999")),
    Row("server: no time", SERVER + "--server.timeout-s 0", ("timeout", "0")),
    Row("server: time without end", SERVER + "--server.timeout-s .inf", ("timeout", "inf")),
    Row("server: fewer than no failures", SERVER + "--server.max-failed -1", ("max_failed", "-1")),
    Row("decode: half of a surrogate pair", "decode a\udce9 --target {target} --method ar", ("prompt", "surrogate")),
    Row("decode: a system prompt that is no text", "decode Hi --system a\udce9 --target {target} --method ar",
        ("prompt", "surrogate")),
    Row("a tree nested too deeply", "decode Hi --target {target} --draft {eagle} --method eagle-tree:tree={file}",
        ("tree", "recursion"), file(b"- " + b"[" * 3000, "t.yaml")),
]  # fmt: skip

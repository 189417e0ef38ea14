"""Files of prompts as they are found, and servers that are none."""

from __future__ import annotations

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


PLACEHOLDER = b'{"turns": ["Hi", "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE\\n\\n{question}"]}'
FETCH = ("x.jsonl, line 1", "a later turn is a placeholder", "SPEED-Bench's prepare_data.py")
ROWS = [
    Row("prompts: no JSON", PROMPTS, ("x.jsonl, line 2", "not JSON"), file(GOOD + b"{")),
    Row("prompts: a placeholder of SPEED-Bench", PROMPTS, FETCH, file(PLACEHOLDER)),
    Row("prompts: no user", PROMPTS, ("x.jsonl, line 1", "no user turn"),
        file(b'{"messages": [{"role": "system", "content": "a"}]}')),
    Row("bench: a placeholder of SPEED-Bench", BENCH + "--prompts {file}", FETCH, file(PLACEHOLDER)),
    Row("a .json cut off", PROMPTS, ("x.json", "not JSON"), file(b'[{"prompt": "a"}, {', "x.json")),
    Row("an empty file", PROMPTS, ("x.jsonl", "empty"), file(b"\n")),
    Row("a file of nothing usable", PROMPTS + "--invalid drop", ("dropped 2: invalid 2",), file(b'{"prompt": 1}\n{')),
    Row("columns that nobody knows", PROMPTS, ("question", "--columns"), file(b'{"question": "a"}')),
    Row("a data set with a bad row", PROMPTS, ("source", "set"), data_set),
    Row("an artifact as a source", "data prompts --source {prompts} --target {target} --output {out}", ("artifact",)),
    Row("no such split", PROMPTS + "--split dev", ("no rows with split dev",), file(b'{"prompt": "a", "split": "b"}')),
    Row("a split of rows that have none", PROMPTS + "--split dev", ("split", "rows without it"), file(GOOD)),
    Row("tasks: no JSON", BENCH + "--tasks {tmp}", ("x.jsonl, line 2", "not JSON"), file(GOOD + b"{")),
    Row("an id twice", PROMPTS, ("x.jsonl, line 2", "x.jsonl, line 1", "'a'"), file(GOOD + GOOD)),
    Row("a template that fails", PROMPTS + "--chat-template {tmp}/t", ("line 1", "chat template", "TypeError"),
        lambda ground, folder: {**file(b"{{ 1 + messages }}", "t")(ground, folder), **file(GOOD)(ground, folder)}),
    Row("a template that is no text", PROMPTS + "--chat-template {tmp}/t", ("t: found", "UTF-8"),
        lambda ground, folder: {**file(b"\xff", "t")(ground, folder), **file(GOOD)(ground, folder)}),
    Row("server: no server", SERVER + "--server.url http://127.0.0.1:9/v1", ("nothing that listens", "127.0.0.1:9")),
    Row("server: a password in the address", SERVER + "--server.url http://me:secret@127.0.0.1:9/v1",
        ("server.url", "found an address with @", "no user, password or query")),
    Row("a password in another address", "data prompts --target {target} --output {out} "
        "--source https://me:secret@127.0.0.1/x.jsonl", ("source: found https://***@127.0.0.1/x.jsonl",)),
    Row("server: a name that no machine has", SERVER + "--server.url http://\u2603.net/v1", ("server.url", "IDNA")),
    Row("decode: half of a surrogate pair", "decode a\udce9 --target {target} --method ar", ("prompt", "surrogate")),
    Row("decode: a system prompt that is no text", "decode Hi --system a\udce9 --target {target} --method ar",
        ("prompt", "surrogate")),
    Row("a tree nested too deeply", "decode Hi --target {target} --draft {eagle} --method eagle-static:tree={file}",
        ("tree", "recursion"), file(b"- " + b"[" * 3000, "t.yaml")),
]  # fmt: skip

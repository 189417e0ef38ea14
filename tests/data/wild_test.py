"""Files of prompts as they are found: whatever is in them, every row is kept, or dropped and counted, or named."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.data.prompts import PromptsConfig, run
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import account
from draftsmith.data.text import template
from draftsmith.data.text.sources import open_source
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.modules.types import InputError

GOOD = b'{"prompt": "Hi"}'
BAD_ROWS: dict[str, tuple[bytes, str]] = {
    "half of a surrogate pair": (rb'{"prompt": "a\ud800"}', r"prompt holds half of a surrogate pair \('\\ud800'\)"),
    "a part without text": (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "says it is text"),
    "deep nesting": (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
    "not UTF-8": (b'{"prompt": "caf\xe9"}', "not UTF-8"),
    "a truncated row": (b'{"prompt": "a', "not JSON"),
    "no object": (b"3", "a JSON int, not an object"),
    "other columns": (b'{"question": "a"}', "columns question, none of messages.*--columns prompt=NAME"),
    "a name that a terminal obeys": (rb'{"a\u001b[1m\n": "b"}', r"columns a\\x1b\[1m\\n, none of messages"),
    "a number for text": (b'{"prompt": 7}', "prompt is 7, expected text"),
    "messages as text": (b'{"messages": "Hi"}', "messages is 'Hi', expected a list"),
    "an unknown role": (b'{"messages": [{"role": "robot", "content": "a"}]}', "unknown role 'robot'"),
    "an id that is a list": (b'{"prompt": "a", "id": [1]}', "a list in column id"),
}


@pytest.fixture
def make(pair, tmp_path, monkeypatch):
    """`data prompts` of a file with this content: (kept rows, counts). The tokenizer is loaded once."""
    tokenizer = template.load_chat_tokenizer(str(pair[0]))
    monkeypatch.setattr(template, "load_chat_tokenizer", lambda *args: tokenizer)
    runs = iter(range(10**6))

    def make(content: bytes, name: str = "x.jsonl", **changes) -> tuple[list[dict], dict[str, int]]:
        folder = tmp_path / f"run-{next(runs)}"
        folder.mkdir()
        (folder / name).write_bytes(content)
        directory = run(PromptsConfig(str(folder / name), str(pair[0]), folder / "out", **changes))
        manifest = Manifest.read(directory)
        return Rows(manifest).read(0, 10**6), manifest.counts

    return make


def lines(*rows: bytes) -> bytes:
    return b"".join(row + b"\n" for row in rows)


@pytest.mark.parametrize("what", BAD_ROWS)
def test_a_bad_row_is_named_by_its_line_or_dropped_and_counted(make, what):
    row, said = BAD_ROWS[what]
    with pytest.raises(InputError, match=rf"x\.jsonl, line 3: found .*{said}") as error:
        make(lines(GOOD, b"", row, b'{"prompt": "Ho"}'))
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    rows, counts = make(lines(GOOD, b"", row, b'{"prompt": "Ho"}'), invalid="drop")
    assert [json.loads(own["messages"])[0]["content"] for own in rows] == ["Hi", "Ho"]
    assert (counts["read"], counts["rows"], counts["invalid_dropped"]) == (3, 2, 1)


def test_the_bench_names_it_too(pair, tmp_path):
    row, said = BAD_ROWS["not UTF-8"]
    (tmp_path / "x.jsonl").write_bytes(lines(GOOD, row))
    with pytest.raises(InputError, match=rf"x\.jsonl, line 2: found .*{said}"):
        read_prompts(str(tmp_path / "x.jsonl"), str(pair[0]))


def test_what_was_read_kept_and_dropped_is_told_by_reason(make, capsys):
    bad = [b'{"prompt": 7}', b"{", b'{"id": "0000000", "prompt": "a"}', b'{"prompt": "' + b"x" * 3000 + b'"}']
    rows, counts = make(lines(GOOD, *bad, GOOD), invalid="drop", overlong="drop")
    assert len(rows) == 2
    told = "read 6, kept 2, dropped 4: invalid 2, duplicate 1, overlong 1"
    assert account(counts) == told and told in " ".join(capsys.readouterr().out.split())


def test_filters_come_before_the_account(make):
    content = lines(b'{"prompt": "a", "split": "dev"}', b'{"prompt": 5, "split": "train"}', b"{", GOOD)
    _, counts = make(content, split="dev", invalid="drop")
    # Nobody knows which split the line that is no JSON was of.
    assert account(counts) == "read 2, kept 1, dropped 1: invalid 1"
    _, counts = make(lines(GOOD, GOOD, b"{"), limit=2)
    assert account(counts) == "read 2, kept 2, dropped 0"


WRITTEN: dict[str, Callable[[bytes], bytes]] = {
    "bom.jsonl": lambda content: b"\xef\xbb\xbf" + content,
    "blank.ndjson": lambda content: b"\n \t\r\n" + content.replace(b"\n", b"\r\n\n").rstrip(),
    "lines.json": lambda content: content,
    "list.json": lambda content: b"\xef\xbb\xbf[" + b",".join(content.splitlines()) + b"]",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_same_rows_in_every_way_of_writing_them(make, name):
    content = lines(GOOD, '{"prompt": "Grüße"}'.encode(), b'{"id": "k", "prompt": "a"}')
    rows, counts = make(WRITTEN[name](content), name)
    assert [json.loads(row["messages"])[0]["content"] for row in rows] == ["Hi", "Grüße", "a"]
    assert counts["read"] == 3


def test_rows_need_not_be_of_one_shape(make):
    shapes = [
        b'{"prompt": "a"}', b'{"messages": [{"role": "user", "content": "b"}]}', b'{"id": "x", "instruction": "c"}',
        b'{"conversations": [{"from": "human", "value": "d"}]}', b'{"turns": ["e", "later"]}',
    ]  # fmt: skip
    rows, _ = make(lines(*shapes))
    assert [json.loads(row["messages"])[0]["content"] for row in rows] == ["a", "b", "c", "d", "e"]
    assert rows[2]["id"] == "x"  # a column that the first row lacks
    rows, _ = make(lines(b'{"question": "a"}', b'{"question": "b", "key": "k"}'), columns="prompt=question,id=key")
    assert [row["id"] for row in rows] == ["0000000", "k"]


def test_a_table_of_several_shapes_is_read_by_what_each_row_fills(make):
    table = pa.Table.from_pylist([{"prompt": "a", "instruction": None}, {"prompt": None, "instruction": "b"}])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    rows, _ = make(sink.getvalue().to_pybytes(), "x.parquet")
    assert [json.loads(row["messages"])[0]["content"] for row in rows] == ["a", "b"]


def test_values_stay_as_they_are_written(tmp_path):
    """One type for a column, as a table has it, would change ids, dates, and the order and nulls of arguments."""
    rows = [{"id": 7, "date": "2024-01-01"}, {"id": "7", "date": None}]
    rows += [{"arguments": {"z": None, "a": [1, "x", 1e400, 2**70]}}, {"arguments": {"a": 1.0, "z": {"b": True}}}]
    (tmp_path / "x.jsonl").write_bytes(lines(*(json.dumps(row).encode() for row in rows)))
    source = open_source(str(tmp_path / "x.jsonl"))
    assert [json.dumps(source.row(index)) for index in range(len(source))] == [json.dumps(row) for row in rows]


@pytest.mark.parametrize("name", ["a[1].jsonl", "s*r.jsonl", "a**.jsonl", "__a/.b c#.jsonl", "a[1].parquet"])
def test_a_path_is_no_pattern(tmp_path, name):
    for other, prompt in ((name, "mine"), ("sxr.jsonl", "other"), ("a1.jsonl", "other")):
        (path := tmp_path / other).parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"prompt": prompt}))
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"prompt": [prompt]}), path)
    source = open_source(str(tmp_path / name))
    assert [source.row(i) for i in range(len(source))] == [{"prompt": "mine"}]


def test_a_file_that_changed_within_its_time_is_read_again(tmp_path):
    (path := tmp_path / "x.jsonl").write_bytes(b'{"prompt": "a"}')
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    assert open_source(str(path)).row(0) == {"prompt": "a"}
    path.write_bytes(b'{"prompt": "b"}')
    os.utime(path, ns=times)
    assert open_source(str(path)).row(0) == {"prompt": "b"}


UNREADABLE: dict[str, tuple[str, bytes, str]] = {
    "gz": ("x.jsonl.gz", GOOD, "Convert or unpack it"),
    "latin-1": ("x.json", b'[{"prompt": "caf\xe9"}]', r"x\.json: found not UTF-8"),
    "scalar": ("x.json", b"3", "found int, expected a list of objects"),
    "empty": ("x.json", b"\xef\xbb\xbf", "which is empty"),
    "parquet": ("x.parquet", b"PAR1", "unreadable"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_cannot_be_read_as_a_whole_is_one_error(make, case):
    name, content, what = UNREADABLE[case]
    for invalid in ("error", "drop"):
        with pytest.raises(InputError, match=what):
            make(content, name, invalid=invalid)


def test_text_of_a_table_that_is_not_utf_8_is_a_bad_row(make):
    bad = pa.array([b"a", b"caf\xe9"], pa.binary()).view(pa.string())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": bad}), sink)
    with pytest.raises(InputError, match=r"x\.parquet, row 1: found unreadable"):
        make(sink.getvalue().to_pybytes(), "x.parquet")
    assert make(sink.getvalue().to_pybytes(), "x.parquet", invalid="drop")[1]["invalid_dropped"] == 1


KEYS = st.sampled_from(
    ["prompt", "answer", "messages", "conversations", "turns", "instruction", "input", "id", "task", "split",
     "role", "content", "from", "value", "type", "text", "system", "history", "tools", "tool_calls", "function",
     "arguments", "name", "tool_call_id", "reasoning", "weight", "chat_template_kwargs"]
) | st.text(max_size=3)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool", "human"]),
        "content": st.text(max_size=5) | VALUES,
    },
    optional={
        "tool_calls": st.lists(VALUES, max_size=2) | VALUES,
        "reasoning": VALUES,
        "weight": VALUES,
        "name": VALUES,
    },
)
ROW = st.dictionaries(KEYS, VALUES, max_size=4) | st.fixed_dictionaries({"messages": st.lists(TURN, max_size=4)})
LINE = (ROW | VALUES).map(lambda row: json.dumps(row).encode()) | st.binary(max_size=20) | st.just(GOOD)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(LINE, min_size=1, max_size=6), end=st.sampled_from([b"\n", b"\r\n"]), supervised=st.booleans())
def test_whatever_is_in_a_file_nothing_is_lost_silently(make, rows, end, supervised):
    content = end.join(rows)
    try:
        kept, counts = make(content, invalid="drop", overlong="drop", supervised=supervised)
    except InputError as error:
        assert "\n" not in str(error).strip()
    else:
        read = sum(1 for line in re.split(rb"[\r\n]", content.removeprefix(b"\xef\xbb\xbf")) if line.strip())
        lost = counts.get("invalid_dropped", 0) + counts.get("duplicate_dropped", 0) + counts.get("overlong_dropped", 0)
        assert (counts["read"], counts["rows"], len(kept)) == (read, read - lost, read - lost)
        assert len({row["id"] for row in kept}) == len(kept)
        if lost:
            with pytest.raises(InputError):
                make(content, supervised=supervised)

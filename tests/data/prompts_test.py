"""Every shape of prompts that is recognized, against messages written by hand; masks; filters; what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import ASSISTANT, CHATML, SYSTEM, USER, chat, chat_tokenizer
from tokenizers.processors import TemplateProcessing
from worlds import CONTEXT

from draftsmith.data.prompts import PromptsConfig, run
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.conversations import parse_columns, read_chat, row_label
from draftsmith.data.text.masks import supervised_ids
from draftsmith.data.text.sources import BENCHMARKS, PRESETS, open_source
from draftsmith.data.text.template import RowError, check_length, encode, load_chat_tokenizer, prompt_ids
from draftsmith.eval.bench.prompts import task_sources
from draftsmith.modules.types import InputError

HI = chat((USER, "Hi"), (ASSISTANT, "Ho"))
# name of the layout, a row, its messages by hand
LAYOUTS = [
    ("sharegpt", {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, HI),
    (
        "sharegpt",
        {"conversations": [{"from": "system", "value": "Be brief"}, {"from": "user", "value": "Hi"}]},
        chat((SYSTEM, "Be brief"), (USER, "Hi")),
    ),
    ("messages", {"messages": HI}, HI),
    ("messages", {"conversations": HI}, HI),
    ("messages", {"messages": [{"role": "system", "content": ""}, *HI]}, HI),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, chat((USER, "Hi"))),
    # vLLM: "\n".join(texts) in renderers/chat_utils.py.
    (
        "parts",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in ("Hi", "you")]}]},
        chat((USER, "Hi\nyou")),
    ),
    ("messages", {"prompt": chat((USER, "Hi")), "chosen": "x"}, chat((USER, "Hi"))),
    ("turns", {"question_id": 81, "category": "writing", "turns": ["Hi", "And now?"]}, chat((USER, "Hi"))),
    ("alpaca", {"instruction": "Sum", "input": "1 2", "output": "3"}, chat((USER, "Sum\n\n1 2"), (ASSISTANT, "3"))),
    ("alpaca", {"instruction": "Sum", "input": "", "output": "3"}, chat((USER, "Sum"), (ASSISTANT, "3"))),
    (
        "prompt",
        {"id": "k", "task": "edit", "prompt": "Hi", "answer": "Ho", "package": "x", "license": "MIT", "split": "dev"},
        HI,
    ),
    ("prompt", {"prompt": "Hi"}, chat((USER, "Hi"))),
]


@pytest.mark.parametrize(("name", "row", "messages"), LAYOUTS)
def test_a_layout_is_recognized_by_its_columns(name, row, messages):
    assert read_chat(row, {}).messages == messages, name


def test_columns_can_be_mapped():
    row = {"question": "Hi", "reply": "Ho", "key": 7, "kind": "edit"}
    mapping = parse_columns("prompt=question, answer=reply,id=key,task=kind")
    assert read_chat(row, mapping).messages == HI
    assert [row_label(row, mapping, name) for name in ("id", "task", "split")] == ["7", "edit", ""]


def test_a_wrong_mapping_is_named(make):
    with pytest.raises(InputError, match=r"columns: found nothing, expected a column of the data"):
        make([{"question": "a"}], columns="prompt=nothing")
    with pytest.raises(InputError, match="expected NAME=COLUMN"):
        parse_columns("question")


ROWS = [{"prompt": f"Hi {i}", "task": ["a", "b"][i % 2], "split": ["train", "dev"][i // 3]} for i in range(6)]


def write_source(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


SLICES = {"train[:50%]": ROWS[:3], "train[4:]": ROWS[4:], "train[:1]+train[-1:]": [ROWS[0], ROWS[-1]]}


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x"])
def test_the_same_rows_from_every_kind_of_source(tmp_path, name):
    path = str(write_source(tmp_path / name, ROWS))
    source = open_source(path)
    assert [source.row(i) for i in range(len(source))] == ROWS and not datasets.are_progress_bars_disabled()
    assert open_source(path).digest == source.digest
    other = open_source(str(write_source(tmp_path / f"other-{name}", ROWS[:-1])))
    assert other.digest != source.digest
    for split, rows in SLICES.items():
        source = open_source(path, split)
        assert [source.row(i) for i in range(len(source))] == rows and source.split_taken
    for split in ("train[:x]", "test[:1]"):
        with pytest.raises(InputError, match=r"expected one of train\. Pass --split NAME, or a slice such as train\["):
            open_source(path, split)
    for split in ("train[40:]", "train[6:]", "train[6:9]", "train[:1%]", "train[50%:50%]", "train[40:]+train[:2]"):
        with pytest.raises(InputError, match=rf"^split: found {re.escape(split)}, which takes none of train's 6 rows"):
            open_source(path, split)


def test_a_folder_of_files_is_read_by_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    write_source(tmp_path / "folder" / "train.jsonl", ROWS)
    write_source(tmp_path / "folder" / "test.jsonl", ROWS[:2])
    source = open_source(str(tmp_path / "folder"), split="test")
    assert [source.row(i) for i in range(len(source))] == ROWS[:2]
    with pytest.raises(InputError, match=r"split: found None, expected one of train, test"):
        open_source(str(tmp_path / "folder"))


@pytest.mark.parametrize(
    "rows",
    [
        ({"messages": HI}, {"prompt": "Hi"}),
        ({"messages": HI, "id": 1}, {"messages": HI, "id": "x"}),
    ],
)
def test_a_folder_of_other_columns_is_named_as_such(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    for name, row in zip("ab", rows, strict=True):
        write_source(tmp_path / "folder" / f"{name}.jsonl", [row])
    with pytest.raises(InputError, match="different columns or types: name them one by one, separated by commas"):
        open_source(str(tmp_path / "folder"))


def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    write_source(tmp_path / "folder" / "a.parquet", [{"prompt": "Hi"}])
    assert len(open_source(str(tmp_path / "folder"))) == 1 and not capsys.readouterr().err.count("not read")
    write_source(tmp_path / "folder" / "b.jsonl", [{"prompt": "Ho"}])
    (tmp_path / "folder" / "c.csv").write_text("prompt\nHu\n")
    assert len(open_source(str(tmp_path / "folder"))) == 1
    assert re.search(r"folder: 2 files are not read, such as (b\.jsonl|c\.csv)\. Name", capsys.readouterr().err)


def test_a_data_set_of_the_hub_is_read_at_its_revision(monkeypatch):
    asked = []

    def load(*args, **options):
        asked.append((args, options))
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(open_source("owner/chats@v1.0", subset="main")) == len(ROWS) == len(open_source("owner/chats"))
    assert asked == [(("owner/chats", "main"), {"revision": "v1.0"}), (("owner/chats", None), {"revision": None})]


def test_a_line_keeps_its_number_in_a_slice(tmp_path):
    path = str(write_source(tmp_path / "x.jsonl", ROWS))
    assert open_source(path, "train[2:]").where(0) == f"{path}, line 5"


def test_without_a_network_a_hub_id_is_one_line(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"source: found someone/set, unreadable \(.*on the Hub.*log in") as error:
        open_source("someone/set")
    assert "\n" not in str(error.value)


def test_a_missing_source_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        open_source(str(tmp_path / "nothing.jsonl"))
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(InputError, match=r"expected a \.jsonl"):
        open_source(str(tmp_path / "x.csv"))


def test_several_sources_are_read_one_after_the_other(pair, tmp_path):
    rows = [{"id": f"r{i}", "prompt": f"Hi {i}"} for i in range(5)]
    names = [
        str(write_source(tmp_path / name, part)) for name, part in (("a.jsonl", rows[:3]), ("b.parquet", rows[3:]))
    ]

    def made(source: str, output: str, **settings) -> tuple[list[str], Manifest]:
        directory = run(PromptsConfig(source, str(pair[0]), tmp_path / output, rows_per_shard=2, **settings))
        manifest = Manifest.read(directory)
        return [row["id"] for row in Rows(manifest).read(0, 9)], manifest

    ids, manifest = made(", ".join(names), "both")
    assert ids == ["r0", "r1", "r2", "r3", "r4"]
    assert manifest.inputs != made(f"{names[1]},{names[0]}", "turned")[1].inputs
    assert made(",".join(names), "four", limit=4)[0] == ids[:4]
    # An id that two of them have is prefixed by both; one that a file has twice is an error with its line.
    write_source(tmp_path / "c.jsonl", [{"id": "r9", "prompt": "Hi"}, {"id": "r1", "prompt": "Hi"}])
    ids, manifest = made(f"{names[0]},{tmp_path / 'c.jsonl'}", "shared")
    assert ids == ["r0", "a/r1", "r2", "r9", "c/r1"] and not manifest.counts.get("duplicate_dropped")
    (tmp_path / "other").mkdir()
    same_name = write_source(tmp_path / "other" / "c.jsonl", [{"id": "r1", "prompt": "Hi"}] * 2)
    with pytest.raises(
        InputError, match=r"other/c\.jsonl, line 3: found the id 'r1', which .*c\.jsonl, line 1 has too"
    ):
        made(f"{tmp_path / 'c.jsonl'},{same_name}", "twice")
    ids, manifest = made(f"{tmp_path / 'c.jsonl'},{same_name}", "dropped", invalid="drop")
    assert ids == ["r9", "1/r1", "2/r1"] and manifest.counts["duplicate_dropped"] == 1
    with pytest.raises(InputError, match=r"found self among self,.*expected self alone"):
        made(f"self,{names[0]}", "self")


@pytest.fixture
def make(pair, tmp_path):
    def make(rows: list[dict], **settings) -> list[dict]:
        path = write_source(tmp_path / "x.jsonl", rows)
        directory = run(PromptsConfig(str(path), str(pair[0]), tmp_path / "out", **settings))
        return Rows(Manifest.read(directory)).read(0, len(rows))

    return make


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
NEVER = PLAIN + "{% if false %}{% generation %}x{% endgeneration %}{% endif %}"


def test_a_template_that_gives_no_mask_is_an_error(make, tmp_path):
    for template, what in ((NEVER, "a mask on the assistant's words"), ("", "expected a chat template")):
        (path := tmp_path / "template.jinja").write_text(template)
        with pytest.raises(InputError, match=what + ".*--chat-template FILE"):
            make([{"messages": HI}], supervised=True, chat_template=path)


def test_a_tokenizer_without_template_is_an_error(pair, tmp_path):
    tokenizer = load_chat_tokenizer(str(pair[0]))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"chat_template: found none.*--chat-template FILE"):
        load_chat_tokenizer(str(tmp_path))


def test_without_a_template_a_prompt_is_what_the_tokenizer_makes_of_the_text(pair, tmp_path):
    """A base model is asked as transformers' own tokenizer asks it: behind <bos>, if it puts one, and nothing else."""
    tokenizer = load_chat_tokenizer(str(pair[0]))
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"bos_token": "<|system|>"})
    first = [("<|system|>", tokenizer.convert_tokens_to_ids("<|system|>"))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|system|> $A", special_tokens=first)
    tokenizer.save_pretrained(str(tmp_path / "target"))
    (tmp_path / "target" / "config.json").write_text("{}")
    tokenizer = load_chat_tokenizer(str(tmp_path / "target"), Path("none"))

    expected = tokenizer("Add the type hints")["input_ids"]
    assert expected[0] == first[0][1]
    assert prompt_ids(tokenizer, chat((USER, "Add the type hints"))) == expected
    ids, mask = supervised_ids(tokenizer, chat((USER, "Add the"), (ASSISTANT, " type hints")))
    learned = [token for token, counts in zip(ids, mask, strict=True) if counts]
    assert ids == expected and tokenizer.decode(learned) == " type hints"


def test_filters_and_limit(make):
    rows = [{"prompt": f"Hi {i}", "task": "abc"[i % 3], "split": ["train", "dev"][i // 4]} for i in range(8)]
    assert [row["task"] for row in make(rows, split="dev", tasks="a, c", limit=2)] == ["c", "a"]


def test_filters_that_leave_nothing_or_lack_their_column(make):
    with pytest.raises(InputError, match="no rows with task c"):
        make(ROWS, tasks="c")
    with pytest.raises(InputError, match="split: found rows without it, expected a column split"):
        make([{"prompt": "a"}], split="dev")


LONG = {"prompt": "x" * (2 * CONTEXT)}


def test_a_prompt_longer_than_the_context_is_an_error_or_dropped_and_counted(make, tmp_path):
    with pytest.raises(InputError, match=rf"x.jsonl, line 3: found \d+ tokens.* more than {CONTEXT}, expected"):
        make([{"prompt": "a"}, LONG])
    assert [row["id"] for row in make([{"prompt": "a"}, LONG, {"prompt": "b"}], overlong="drop")] == [
        "0000000",
        "0000002",
    ]
    assert Manifest.read(tmp_path / "out").counts["overlong_dropped"] == 1


def test_of_a_text_far_beyond_the_context_the_beginning_is_tokenized(make, monkeypatch, tmp_path):
    """20 MB in one row took 5 GB, and 100 MB the process."""
    sizes = [0]

    def measured(tokenizer, text):
        sizes.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr("draftsmith.data.text.template.encode", measured)
    long = {"messages": [*HI, *chat((USER, "c"), (ASSISTANT, "letters " * 100_000))]}
    with pytest.raises(InputError, match=rf"line 1: found 800,\d+ characters.* more than {CONTEXT}, expected"):
        make([long], supervised=True)
    make([long, {"messages": HI}], supervised=True, overlong="drop")
    assert max(sizes) == 16 * CONTEXT and Manifest.read(tmp_path / "out").counts["overlong_dropped"] == 1
    # A long text of few tokens fits.
    tokenizer = chat_tokenizer(CHATML, more=(token := f"<|{'x' * 96}|>",))
    check_length(tokenizer, token * 50, 60)
    with pytest.raises(RowError, match="more than 60"):
        check_length(tokenizer, token * 500, 60)


NAMED_ROWS = {
    "sharegpt": {"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    "ultrachat": {"prompt": "Hi", "prompt_id": "x", "messages": HI},
    "perfectblend": {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}],
        "source": "y",
    },
    "magpie": {"uuid": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    "gsm8k": {"question": "Hi", "answer": "Ho"},
    "deepspec/gsm8k": {"question": "Hi", "answer": "Ho"},
    "deepspec/math500": {"problem": "Hi", "solution": "So", "answer": "Ho", "unique_id": "x"},
    "deepspec/aime25": {"problem": "Hi", "answer": "Ho", "id": "0"},
    "deepspec/humaneval": {"task_id": "x/0", "prompt": "Hi", "canonical_solution": "Ho", "entry_point": "f"},
    "deepspec/mbpp": {"task_id": 1, "prompt": "Hi", "code": "Ho", "test_list": ["assert f()"]},
    "deepspec/mt_bench": {"prompt": ["Hi", "And?"], "category": "writing", "prompt_id": 1, "reference": []},
    "speed-bench": {"question_id": "x", "category": "qa", "turns": ["Hi"], "source": "y", "multiturn": False},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_data_set_by_its_short_name(monkeypatch, tmp_path, name):
    """A local directory has the splits and columns of the hub's; tasks of files elsewhere are JSONL."""
    preset = PRESETS[name]
    if preset.file is None:
        rows = datasets.Dataset.from_list([NAMED_ROWS[name]])
        datasets.DatasetDict({preset.split: rows, "other": rows}).save_to_disk(str(tmp_path / "set"))
        changed = dataclasses.replace(preset, hub=str(tmp_path / "set"))
    else:
        (file := tmp_path / "x.jsonl").write_text('{"question_id": 81, "category": "qa", "turns": ["Hi", "And?"]}')
        changed = dataclasses.replace(preset, file=str(file))
    monkeypatch.setitem(PRESETS, name, changed)
    source = open_source(name)
    messages = read_chat(source.row(0), {}).messages
    assert len(source) == 1 and source.split_taken and messages in (HI, HI[:1])
    assert name.partition("/")[0] in BENCHMARKS or messages == HI


def test_tasks_of_a_benchmark():
    six = ["mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa"]
    assert [name for name, _ in task_sources("six-tasks")] == six
    assert task_sources("spec-bench,deepspec")[:2] == [("", "spec-bench"), ("gsm8k", "deepspec/gsm8k")]

"""Several artifacts as one data set: how often each row comes, which lists are refused, and what stays as it was."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from chats import rows_of

import draftsmith
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.parts import Part, parts_of
from draftsmith.eval.settings import DiagnoseConfig
from draftsmith.launch.diagnose import read_rows
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.types import InputError


@pytest.fixture(scope="module")
def other(chain, make_stage, tmp_path_factory) -> Path:
    """Responses beside those of the chain, of its first five prompts and shorter."""
    directory = tmp_path_factory.mktemp("other") / "responses"
    changes = {"output": directory, "limit": 5, "max_new_tokens": 4}
    return make_stage("responses", dataclasses.replace(chain.configs["responses"], **changes))


def words(data, epoch: int = 0) -> Counter[tuple[int, ...]]:
    return Counter(tuple(data.item(i, epoch)["input_ids"].tolist()) for i in range(len(data)))


# -- PATH*N


def test_a_weight_stands_behind_the_last_star(tmp_path):
    (tmp_path / "a*b").mkdir()
    (tmp_path / "a*2").mkdir()
    assert parts_of("runs/a*2") == (Part(Path("runs/a"), 2),) == parts_of([Path("runs/a*2")])
    assert parts_of(["x", "y*.5", "z*1.25"]) == (Part(Path("x")), Part(Path("y"), 0.5), Part(Path("z"), 1.25))
    # Paths with a star that are there.
    assert parts_of([f"{tmp_path}/a*b", f"{tmp_path}/a*2"]) == (Part(tmp_path / "a*b"), Part(tmp_path / "a*2"))
    assert parts_of(f"{tmp_path}/a*b*3") == (Part(tmp_path / "a*b", 3),)
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match="which are both there"):
        parts_of(f"{tmp_path}/a*2")
    assert parts_of([f"{tmp_path}/a*2*1", f"{tmp_path}/a/*2"]) == (Part(tmp_path / "a*2"), Part(tmp_path / "a", 2))


@pytest.mark.parametrize("weight", ["0", "0.0", "-2", "nan", "inf", "two", "", "1e3", "1_0", "2x", " 2", "1001"])
def test_another_weight_is_refused_in_one_line(weight):
    with pytest.raises(InputError, match=r"data: found 'runs/a\*.*expected DIR or DIR\*N") as error:
        parts_of(f"runs/a*{weight}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", ["*2", []])
def test_no_artifact_is_refused(data):
    with pytest.raises(InputError, match=r"^data: found"):
        parts_of(data)


# -- an epoch


def test_an_epoch_has_every_row_as_often_as_its_weight_says(chain, other):
    one, two = open_dataset(chain.directory("responses")), open_dataset(other)
    both = open_dataset([chain.directory("responses"), f"{other}*2"])
    assert words(both) == words(one) + words(two) + words(two) == words(both, epoch=3)
    assert both.id_range == (min(one.id_range[0], two.id_range[0]), max(one.id_range[1], two.id_range[1]))
    assert [both.name(i) for i in range(len(both))] == [
        data.name(i)
        for data in sorted((one, two), key=lambda data: data.digest)
        for i in range(len(data))
        for _ in range(1 + (data is two))
    ]
    # Counts of tokens and answers take each row once.
    every = range(len(both))
    counts = one.token_counts(range(len(one)), 320) + two.token_counts(range(len(two)), 320)
    assert torch.equal(both.token_counts(every, 320), counts)
    assert both.answer_lengths(every).sum() == one.answer_lengths(range(11)).sum() + two.answer_lengths(range(5)).sum()
    # Samples of one artifact alone: the other has none of them.
    for i in (0, len(both) - 1):
        ((ids, _),), (item,) = both.whole_texts([i]), both.whole_items([i])
        assert ids.tolist() == item["input_ids"].tolist() == both[i]["input_ids"].tolist()
        assert both.answer_lengths([i]).tolist() == [int(both[i]["loss_mask"].sum())]
    # The order of the list changes nothing.
    turned = open_dataset([f"{other}*2", str(chain.directory("responses"))])
    assert turned.digest == both.digest == " + ".join(sorted([one.digest, f"{two.digest}*2"]))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(turned, both, strict=True))


@pytest.mark.parametrize(("weight", "count"), [(0.5, 6), (0.01, 1), (1.25, 14), (2, 22)])
def test_a_fraction_takes_that_share_of_the_rows_and_always_the_same(chain, weight, count):
    directory = chain.directory("responses")
    data = open_dataset(f"{directory}*{weight}")
    assert len(data) == count  # of 11 rows, to the nearest, and one at least
    assert words(data) == words(open_dataset(f"{directory}*{weight}"), epoch=1)
    assert words(open_dataset(f"{directory}*0.3")) <= words(open_dataset(f"{directory}*0.6"))


def test_pieces_of_joined_rows_are_those_of_each(chain, other):
    directories = [chain.directory("responses"), f"{other}*1.5"]
    data, pieces = (open_dataset(directories) for _ in range(2))
    pieces = pieces.in_pieces(16, overlap=3)
    assert len(pieces) > len(data) and max(pieces.lengths) == 16
    assert set(pieces.hashes.tolist()) == set(data.hashes.tolist())
    assert [len(pieces.item(i, 0)["input_ids"]) for i in range(len(pieces))] == pieces.lengths.tolist()


def test_copies_of_labels_are_mixed_anew(chain):
    directory = chain.directory("acceptance")
    one, two = open_dataset(directory, mix=0.5), open_dataset(f"{directory}*2", mix=0.5)
    for epoch in (0, 1):
        for i in range(len(two)):
            expected = one.item(int(two.rows[i]), 2 * epoch + int(two.copies[i]))
            assert torch.equal(two.item(i, epoch)["z_ids"], expected["z_ids"])
    assert two.copies.tolist() == [0, 1] * len(one)


def test_joined_features_keep_their_files(chain, make_stage, other, tmp_path):
    changes = {"data": other, "output": tmp_path / "features"}
    made = make_stage("features", dataclasses.replace(chain.configs["features"], **changes))
    directories = [chain.directory("features"), f"{made}*2"]
    both, listed = open_dataset(directories), draftsmith.open_dataset(directories)
    assert len(both) == len(listed) == 21
    alone = {tuple(item["input_ids"].tolist()): item["features"] for d in directories for item in open_dataset(d)}
    for item, row in zip(both, listed, strict=True):
        expected = alone[tuple(item["input_ids"].tolist())]
        assert torch.equal(item["features"], expected) and torch.equal(row["features"], expected)
    batch = draftsmith.collate([listed[0], listed[20]])
    assert batch.features.shape[0] == 2


# -- artifacts that do not belong together


def changed(directory: Path, output: Path, change) -> Path:
    """Copy an artifact with another manifest."""
    shutil.copytree(directory, output)
    manifest = json.loads((output / "manifest.json").read_text())
    change(manifest)
    (output / "manifest.json").write_text(json.dumps(manifest))
    return output


def identity(name: str, value: object):
    def change(manifest: dict) -> None:
        *path, last = name.split(".")
        place = manifest["identity"]
        for key in path:
            place = place[key]
        place[last] = value

    return change


def teacher(manifest: dict) -> None:
    manifest["teacher"]["scale"] = 2.0


def dtype(manifest: dict) -> None:
    manifest["fields"] = [f | {"dtype": "float8_e4m3fn"} if f["name"] == "features" else f for f in manifest["fields"]]


def sampling(manifest: dict) -> None:
    manifest["sampling"]["temperature"] = 0.5


@pytest.mark.parametrize(
    ("stage", "field", "change"),
    [
        *[
            ("responses", name, identity(name, "another"))
            for name in ("tokenizer", "encoding", "chat_template", "own_template", "target.weights", "target.config")
        ],
        ("features", "target.layers", identity("target.layers", "1,2")),
        ("features", "readout", teacher),
        ("features", "dtype", dtype),
        ("acceptance", "draft.weights", identity("draft.weights", "another")),
        ("acceptance", "sampling", sampling),
    ],
)
def test_artifacts_that_disagree_are_refused_with_both_names_and_the_field(chain, tmp_path, stage, field, change):
    one, two = chain.directory(stage), changed(chain.directory(stage), tmp_path / "two", change)
    with pytest.raises(InputError) as error:
        open_dataset([one, two])
    assert str(error.value).startswith(f"data: found {one} with {field} ") and f"{two} with" in str(error.value)
    assert "\n" not in str(error.value)


def test_texts_of_other_samplings_join_and_say_so(chain, tmp_path):
    two = changed(chain.directory("responses"), tmp_path / "two", sampling)
    data = open_dataset([chain.directory("responses"), f"{two}*3"])
    assert data.manifest.sampling is None
    assert {(one["weight"], one["sampling"]["temperature"]) for one in data.recorded} == {(1, 1.0), (3, 0.5)}


def test_a_server_that_does_not_know_its_weights_does_not_disagree(chain, tmp_path):
    def forget(manifest: dict) -> None:
        del manifest["identity"]["target"]["weights"]

    two = changed(chain.directory("responses"), tmp_path / "two", forget)
    assert len(open_dataset([chain.directory("responses"), two])) == 22


@pytest.mark.parametrize(("one", "two"), [("responses", "features"), ("prompts", "responses")])
def test_artifacts_of_other_kinds_are_refused(chain, one, two):
    with pytest.raises(InputError, match=r"with kind .* and .* with "):
        open_dataset([chain.directory(one), chain.directory(two)])


def test_the_same_artifact_twice_is_refused_with_the_weight_to_pass(chain, tmp_path):
    one, copied = chain.directory("responses"), shutil.copytree(chain.directory("responses"), tmp_path / "copied")
    with pytest.raises(InputError, match=rf"the same artifact.*Pass it once: {copied}\*3\.5"):
        open_dataset([one, f"{copied}*2.5"])


# -- hashes of conversations


def test_a_row_has_the_same_hash_in_every_artifact(chain, remake):
    of = {stage: open_dataset(chain.directory(stage)).hashes for stage in ("responses", "features", "acceptance")}
    assert np.array_equal(of["responses"], of["features"]) and np.array_equal(of["responses"], of["acceptance"])
    few = open_dataset(remake("responses", limit=4))
    assert few.hashes.tolist() == of["responses"][:4].tolist() and len(set(of["responses"].tolist())) == 11


def test_a_diagnosis_reads_as_many_rows_of_each_as_an_epoch_has(chain, other):
    target = Checkpoint(chain.target)
    config = DiagnoseConfig("head", (str(chain.directory("responses")), f"{other}*2.2"), str(chain.target), limit=8)
    rows, manifest = read_rows(config, target, ("responses",), 200)
    # Of 11 rows and 2.2 times 5.
    expected = [rows_of(directory)[:4] for directory in (chain.directory("responses"), other)]
    assert rows == [*expected[0], *expected[1]] and manifest.kind == "responses"

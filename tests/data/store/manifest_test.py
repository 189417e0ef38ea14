"""Opening artifacts: what is unfinished, damaged or made with something else is told in one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from draftsmith.data.responses import ResponsesConfig
from draftsmith.data.store import manifest
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.manifest import MANIFEST, Manifest, command_line, decisive, open_artifact
from draftsmith.launch.cli import main
from draftsmith.modules.pretrained.files import write_json
from draftsmith.modules.pretrained.provenance import file_sha256
from draftsmith.modules.types import InputError

STAGES = ("prompts", "responses", "acceptance", "features")


@pytest.fixture
def copy(chain, tmp_path):
    """A copy of an artifact to damage."""

    def make(stage: str):
        return shutil.copytree(chain.directory(stage), tmp_path / stage)

    return make


def test_every_differing_key_is_listed_with_the_command_that_makes_it_again(chain):
    manifest = Manifest.read(chain.directory("acceptance"))
    other = {
        "target": {**manifest.identity["target"], "lm_head": "aaaa"},
        "tokenizer": "bbbb",
        "draft": {"config": "cccc"},
    }
    with pytest.raises(InputError) as caught:
        open_artifact(chain.directory("acceptance"), "acceptance", other)
    message = str(caught.value)
    assert "\n" not in message
    for ours, key in (("aaaa", "target.lm_head"), ("bbbb", "tokenizer"), ("cccc", "draft.config")):
        assert f"{key}: " in message and f"{ours} given" in message
    assert "target.config" not in message
    assert f"Make it again: {manifest.command}" in message


def test_a_hash_that_a_stage_could_not_know_does_not_count_but_a_missing_model_does(chain):
    directory = chain.directory("responses")
    open_artifact(directory, "responses", {"target": {"unheard_of": "x"}})
    with pytest.raises(InputError, match=r"draft\.config: None here, x given"):
        open_artifact(directory, "responses", {"draft": {"config": "x"}})


def test_another_kind_is_refused(chain):
    with pytest.raises(InputError, match="found an artifact of kind prompts, expected kind responses"):
        open_artifact(chain.directory("prompts"), "responses")


def test_a_directory_that_is_none(tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        Manifest.read(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"no manifest\.json"):
        Manifest.read(tmp_path)
    # A head has a manifest of its own, which must not be deleted.
    for name in ("config.json", "manifest.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=r"found a model or a head, expected an artifact's directory\. Check"):
        Manifest.read(tmp_path)
    (tmp_path / "chats.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"found a file, .* data prompts --source .*chats\.jsonl"):
        Manifest.read(tmp_path / "chats.jsonl")


def test_a_damaged_manifest_and_another_schema(copy):
    directory = copy("prompts")
    raw = json.loads((directory / MANIFEST).read_text())
    write_json(directory / MANIFEST, {**raw, "schema_version": 99})
    with pytest.raises(InputError, match="schema version 99, expected version 1"):
        Manifest.read(directory)
    for content in ("{", "[]"):
        (directory / MANIFEST).write_text(content)
        with pytest.raises(InputError, match=r"damaged|expected an object"):
            Manifest.read(directory)


def shard_of(directory, stage: str):
    return directory / ("shard-00001.safetensors" if stage == "features" else "shard-00001.parquet")


@pytest.mark.parametrize(
    ("stage", "damage"),
    [("prompts", "truncated"), ("responses", "altered"), ("features", "missing"), ("features", "altered")],
)
def test_a_damaged_shard_is_named_and_only_it_is_made_again(copy, chain, make_stage, stage, damage):
    directory = copy(stage)
    shard, whole = shard_of(directory, stage), file_sha256(shard_of(directory, stage))
    content = bytearray(shard.read_bytes())
    if damage == "truncated":
        shard.write_bytes(content[:-1])
    elif damage == "altered":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    else:
        shard.unlink()
    expected = {"truncated": "bytes", "altered": "sha256", "missing": "no file"}[damage]
    with pytest.raises(
        InputError, match=rf"{shard.name}: found .*{expected}.*rebuilds just this shard: draftsmith data"
    ):
        open_artifact(directory)
    if damage == "altered":
        open_artifact(directory, check="size")
        shard.unlink()  # as the remedy says
    kept = (directory / "shard-00000.parquet").stat().st_mtime_ns
    make_stage(stage, dataclasses.replace(chain.configs[stage], output=directory))
    open_artifact(directory)
    assert file_sha256(shard) == whole
    assert (directory / "shard-00000.parquet").stat().st_mtime_ns == kept


def test_another_configuration_in_the_same_directory_lists_what_differs(chain, make_stage, copy, pair):
    directory = copy("responses")
    changed = dataclasses.replace(chain.configs["responses"], output=directory, temperature=0.5, seed=3)
    with pytest.raises(InputError) as caught:
        make_stage("responses", changed)
    assert "config.seed: 0, now 3; config.temperature: 1.0, now 0.5" in str(caught.value)
    other = dataclasses.replace(chain.configs["responses"], output=directory, target=str(pair[1]))
    with pytest.raises(InputError, match=r"identity\.target\.config: \w+, now \w+; identity\.target\.lm_head"):
        make_stage("responses", other)


def test_what_does_not_change_the_content_may_change(chain, make_stage, copy):
    directory = copy("responses")
    before = file_sha256(directory / MANIFEST)
    make_stage("responses", dataclasses.replace(chain.configs["responses"], output=directory, num_threads=0))
    assert file_sha256(directory / MANIFEST) == before


def test_a_directory_that_holds_something_else_is_left_alone(chain, make_stage, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"holds thesis\.tex"):
        make_stage("prompts", dataclasses.replace(chain.configs["prompts"], output=tmp_path))


def test_the_manifest_says_what_the_design_promises(chain):
    manifest = Manifest.read(chain.directory("acceptance"))
    texts = {"tokenizer", "encoding", "chat_template", "own_template"}
    assert set(manifest.identity) == texts | {"target", "draft"}
    assert manifest.inputs == {"responses": Manifest.read(chain.directory("responses")).digest}
    assert manifest.sampling == {"temperature": 1.0, "top_k": 40, "top_p": 0.95}  # the responses' own
    assert manifest.counts["rows"] == sum(e.rows for e in manifest.files) == 11
    assert manifest.packages["torch"] and manifest.seed == 0
    assert {f.name: f.shape for f in manifest.fields}["accept_prob"] == ("R",)


def test_the_digest_follows_the_content_and_not_the_place(chain):
    manifest = Manifest.read(chain.directory("prompts"))
    assert dataclasses.replace(manifest, command="x", git_commit="y", config={}).digest == manifest.digest
    assert dataclasses.replace(manifest, counts={"rows": 1}).digest != manifest.digest
    assert dataclasses.replace(manifest, files=manifest.files[:-1]).digest != manifest.digest


def test_a_command_line_names_what_is_not_default(tmp_path):
    config = ResponsesConfig(tmp_path / "a b", "t", tmp_path / "o", top_k=5, trust_remote_code=True)
    assert command_line("data responses", config) == (
        f"draftsmith data responses --data '{tmp_path}/a b' --target t --output {tmp_path}/o "
        "--trust-remote-code true --top-k 5"
    )
    assert "engine" in decisive(config) and "data" not in decisive(config)


def test_data_of_a_fine_tuned_target_is_refused_everywhere(chain, tmp_path, capsys):
    tuned = Path(shutil.copytree(chain.target, tmp_path / "tuned"))
    state = load_file(tuned / "model.safetensors")
    state |= {name: tensor * 1.15 for name, tensor in state.items() if "_proj" in name}
    save_file(state, tuned / "model.safetensors", {"format": "pt"})
    responses, out = chain.directory("responses"), tmp_path / "out"
    labels, made = chain.directory("acceptance"), chain.directory("features")
    for words in (
        f"data features --data {responses} --target {tuned}",
        f"data acceptance --data {responses} --target {tuned} --head {chain.draft}",
        f"train eagle --data {made} --target {tuned}",
        f"train eagle --data {responses} --target {tuned}",
        f"train acceptance --data {labels} --head {tuned}",
    ):
        assert main([*words.split(), "--output", str(out)]) == 2, words
        error = capsys.readouterr().err.splitlines()[-1]
        assert ".weights: " in error and "Make it again: draftsmith data" in error, error


@pytest.mark.parametrize(("stage", "made_by"), [("responses", "prompts"), ("features", "responses")])
def test_an_input_is_read_from_where_it_was_opened_whatever_its_link_does(
    chain, remake, tmp_path, monkeypatch, stage, made_by
):
    """The link leads nowhere once the artifact is open: whoever follows it again fails."""
    link, check = tmp_path / "link", manifest.check_files
    link.symlink_to(chain.directory(made_by))

    def check_and_move(*args) -> None:
        check(*args)
        if link.is_symlink():
            link.unlink()

    monkeypatch.setattr(manifest, "check_files", check_and_move)
    made = remake(stage, data=link)
    for name in (path.name for path in chain.directory(stage).glob("shard-*") if path.suffix != ".json"):
        assert (made / name).read_bytes() == (chain.directory(stage) / name).read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["files"].clear(),
        lambda raw: raw["files"][0].update(rows=-1),
        lambda raw: raw["files"][1].update(rows=10**12),
        lambda raw: raw["files"][1].update(rows=raw["files"][1]["rows"] + 1),
        lambda raw: raw.update(sampling={"temperature": "hot", "top_k": 0, "top_p": 1.0}),
        lambda raw: raw.update(sampling={"top_k": 0}),
        lambda raw: raw["counts"].update(rows="5"),
    ],
    ids=["no files", "-1 rows", "1e12 rows", "a row more", "a text", "no temperature", "a text for a count"],
)
def test_an_odd_manifest_is_one_line(copy, change):
    directory = copy("responses")
    raw = json.loads((directory / MANIFEST).read_text())
    change(raw)
    write_json(directory / MANIFEST, raw)
    with pytest.raises(InputError) as caught:
        open_dataset(directory, check="size")
    assert "\n" not in str(caught.value)

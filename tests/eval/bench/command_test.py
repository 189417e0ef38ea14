"""The bench end to end on tiny models, every count against another way to know it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from worlds import draft_options

from draftsmith.eval.bench import command as bench
from draftsmith.eval.bench.command import BenchConfig
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.bench.results import read_rows
from draftsmith.launch.cli import main
from draftsmith.modules.pretrained.card import measured_of
from draftsmith.modules.pretrained.heads import load_head, save_head
from draftsmith.modules.types import InputError

METHODS = "spec:k=3,specdec++:h=0.7:min=1:max=6,specdec++:h=0.3:calibrated=on,eagle:k=2"
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def config(models, tmp_path_factory) -> BenchConfig:
    output = tmp_path_factory.mktemp("bench")
    return BenchConfig(
        **draft_options(models),
        methods=METHODS,
        split="test",
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
        repeats=2,
        output=output,
    )


@pytest.fixture(scope="module")
def results(config) -> dict:
    bench.run(config)
    return json.loads((config.output / "results.json").read_text())


@pytest.fixture(scope="module")
def per_prompt(config, results) -> list[dict]:
    return read_rows(config.output)


def test_the_baseline_is_measured_although_it_was_not_listed(results):
    assert [row["method"] for row in results["methods"]] == ["ar", *METHODS.split(",")]
    first = results["methods"][0]
    assert (first["speedup"], first["speedup_ci95"], first["tau"]) == (1.0, [1.0, 1.0], 1.0)
    assert results["meta"]["clock"] == "cpu"
    assert all(row["tokens"] == 5 * NEW_TOKENS and row["matches_ar"] is True for row in results["methods"])


def test_an_answer_ends_at_the_end_token_unless_told_otherwise(config, per_prompt, tmp_path):
    """A random model seldom ends by itself, so one that it does emit is made an end token, beside the tokenizer's."""
    first, tokenizer = per_prompt[0], transformers.AutoTokenizer.from_pretrained(config.target)
    ends = [first["token_ids"][7], tokenizer.eos_token_id]
    target = tmp_path / "target"
    model = transformers.AutoModelForCausalLM.from_pretrained(config.target)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(target)
    tokenizer.save_pretrained(str(target))
    methods, output = "spec:k=3,eagle:k=2", tmp_path / "out"
    ending = dataclasses.replace(config, target=str(target), methods=methods, ignore_eos=False, limit=1, output=output)
    found = bench.bench(ending)
    end = next(place for place, token in enumerate(first["token_ids"]) if token in ends)
    for row in found["methods"]:
        assert (row["tokens"], row["ended"], row["matches_ar"]) == (end + 1, 1, True)
        assert row["num_draft_tokens"] + row["num_target_calls"] == row["tokens"] + row["num_discarded"]


def test_a_prompts_artifact_gives_the_same_prompts_as_its_file(models, tmp_path):
    arguments = ["--source", models["data"], "--target", models["target"], "--output", str(tmp_path / "prompts")]
    assert main(["data", "prompts", *arguments]) == 0
    from_file = read_prompts(models["data"], models["target"])
    assert read_prompts(str(tmp_path / "prompts"), models["target"]) == from_file
    only_a = read_prompts(models["data"], models["target"], split="test", tasks="a", limit=2)
    of_a = [prompt for prompt in from_file if prompt.task == "a"][:2]
    assert only_a == [dataclasses.replace(prompt, number=number) for number, prompt in enumerate(of_a)]
    with pytest.raises(InputError, match="no row of split dev"):
        read_prompts(models["data"], models["target"], split="dev")


def test_several_drafters_of_a_kind_are_measured_beside_each_other(config, models, tmp_path):
    """Each has the counts of a bench of its own, and its own identity in the results."""
    head = load_head(models["eagle"])
    with torch.no_grad():
        head.fc.weight.mul_(0.5)
    manifest = json.loads((Path(models["eagle"]) / "manifest.json").read_text())
    other = save_head(tmp_path / "b" / "best", head, {"target": manifest["target"]}, "card")
    heads = {"a": str(shutil.copytree(models["eagle"], tmp_path / "a" / "best")), "b": str(other)}
    drafts = {name: str(shutil.copytree(models["draft"], tmp_path / name / "draft")) for name in ("c", "d")}
    shared = dataclasses.replace(config, acceptance=None, repeats=1, limit=2, traces=1)
    both = dataclasses.replace(
        shared,
        head=(*heads.values(), *drafts.values()),
        methods="eagle:k=2,eagle@b:k=3,spec:k=2",
        output=tmp_path / "both",
        card=True,
    )
    results = bench.bench(both)
    named = [f"eagle@{name}:k=2" for name in heads] + ["eagle@b:k=3"] + [f"spec@{name}:k=2" for name in drafts]
    assert [row["method"] for row in results["methods"]] == ["ar", *named]
    assert set(results["meta"]["heads"]) == {"eagle@a", "eagle@b"}

    def drafted(output: Path) -> dict[str, list]:
        by_method: dict[str, list] = {}
        for line in map(json.loads, (output / "trace.jsonl").read_text().splitlines()):
            by_method.setdefault(line["method"], []).append(line.get("drafted"))
        return by_method

    together = drafted(tmp_path / "both")
    for name, path in {**heads, **drafts}.items():
        method, output = "eagle" if name in heads else "spec", tmp_path / f"{name}-alone"
        bench.bench(dataclasses.replace(shared, head=(path,), methods=f"{method}:k=2", output=output))
        assert drafted(output)[f"{method}:k=2"] == together[f"{method}@{name}:k=2"]
    assert together["eagle@a:k=2"] != together["eagle@b:k=2"]
    assert [row["method"] for row in measured_of(heads["b"])["methods"]] == ["eagle@b:k=2", "eagle@b:k=3"]
    with pytest.raises(InputError, match=r"eagle@x.*@a, @b"):
        bench.bench(dataclasses.replace(both, methods="eagle@x:k=2", output=tmp_path / "no"))


@pytest.mark.parametrize(
    ("method", "missing"), [("eagle3:k=3", "gone-for-good"), ("online:drafter=eagle3", "/gone/best"), ("pld", "/gone")]
)
def test_a_draft_that_is_not_here_is_named_whatever_the_methods(config, tmp_path, method, missing):
    wrong = dataclasses.replace(config, head=(missing,), acceptance=None, methods=method, output=tmp_path / "out")
    with pytest.raises(InputError, match=f"^head: found no directory .*{missing}, expected a "):
        bench.bench(wrong)


def test_a_card_shows_what_results_json_says_and_the_heads_still_load(config, models, tmp_path):
    heads = {flag: shutil.copytree(models[flag], tmp_path / flag) for flag in ("eagle", "acceptance")}
    methods = "spec:k=3,specdec++:h=0.7:max=6,eagle:k=2"
    paths = {"head": (models["draft"], str(heads["eagle"])), "acceptance": str(heads["acceptance"])}
    carded = dataclasses.replace(config, **paths, methods=methods, repeats=1, card=True, output=tmp_path / "out")
    found = bench.bench(carded)
    wanted = {row["method"]: row for row in json.loads((tmp_path / "out" / "results.json").read_text())["methods"]}
    for flag, label in (("eagle", "eagle:k=2"), ("acceptance", "specdec++:h=0.7:max=6")):
        card, measured = (heads[flag] / "README.md").read_text(), measured_of(heads[flag])
        parts = {"all": wanted[label], **{part["name"]: part for part in wanted[label]["by"]["task"]}}
        assert set(parts) == {"all", "a", "b"}
        for task, part in parts.items():
            numbers = f"{part['prompts']} | {part['tokens']:,} | {part['tau']:.3f} | {part['speedup']:.2f}x"
            assert f"| {task} | {label} | {numbers} |" in card
        assert "emitted tokens per target call under greedy decoding" in card and "spec:k=3" not in card
        classes = [part for part in wanted[label]["by"]["context"] if part["rounds"] >= 30]
        for part in classes if len(classes) > 1 else ():
            assert f"| context | {part['name']} | {label} | {part['rounds']:,} | {part['tau']:.3f} |" in card
        assert [row["method"] for row in measured["methods"]] == [label]
        assert measured["methods"][0]["by"]["task"][1]["tau"] == wanted[label]["by"]["task"][1]["tau"]
        counts = measured["methods"][0]["answers"]
        assert len(counts["drafts"]) == len(counts["accepted"]) == wanted[label]["prompts"]
        first = sum(own[0] for own in counts["accepted"]) / sum(counts["drafts"])
        assert first == pytest.approx(wanted[label]["accepted_by_place"][0])
        assert measured["prompts"] == found["meta"]["prompts"] and measured["settings"]["max_new_tokens"] == NEW_TOKENS
        assert load_head(heads[flag]).config == load_head(models[flag]).config


def test_a_finished_run_is_measured_again_only_if_asked_to_and_not_replaced_by_another(
    config, results, monkeypatch, capsys
):
    before = (config.output / "results.json").read_bytes()
    measured = []
    monkeypatch.setattr(bench.PromptRunner, "run_all", lambda *args: measured.append(args) or [][0])
    assert bench.run(config) == 0
    said = capsys.readouterr().err
    assert "already done" in said and "Written to" not in said
    assert (config.output / "results.json").read_bytes() == before
    with pytest.raises(InputError, match=r"measured with another settings\.repeats: 2, now 3.*--again"):
        bench.run(dataclasses.replace(config, repeats=3))
    with pytest.raises(IndexError):  # what the stand-in raises: it was called
        bench.run(dataclasses.replace(config, repeats=3, again=True))
    (config.output / "journal.jsonl").unlink()
    assert len(measured) == 1

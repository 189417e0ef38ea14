"""Models, heads and settings that do not fit: one line and exit code 2, from `eval bench` and from `decode` alike."""

from __future__ import annotations

import re
import shutil

import pytest
from worlds import CONTEXT, draft_words, tiny_llama_dir, varied_acceptance_head

from draftsmith.benchmarks.embedded.tokenizer import train_tokenizer
from draftsmith.launch.cli import main
from draftsmith.modules.pretrained.heads import drafter_identity, save_head
from draftsmith.modules.pretrained.models import load_lm


@pytest.fixture(scope="module")
def world(models, tmp_path_factory) -> dict[str, str]:
    """`models`, and what does not fit them."""
    root = tmp_path_factory.mktemp("unfitting")
    other = tiny_llama_dir(root / "other", seed=5)
    narrow = tiny_llama_dir(root / "narrow", hidden=16)
    # The size is the same, the words are not.
    foreign = shutil.copytree(models["draft"], root / "foreign")
    train_tokenizer(["While the queue is empty, wait: nobody reads it."] * 4, 2048, CONTEXT).save_pretrained(
        str(foreign)
    )
    target = load_lm(models["target"])
    head = varied_acceptance_head(32)
    identity = drafter_identity(models["eagle"], target)
    for_eagle = save_head(root / "for-eagle", head, {"target": identity}, "card")
    other_eagle = save_head(root / "other-eagle", head, {"target": {**identity, "eagle": "0" * 16}}, "card")
    for_target = save_head(root / "for-target", head, {"target": target.info.identity}, "card")
    found = {"other": other, "narrow": narrow, "foreign": foreign, "for-eagle": for_eagle,
             "other-eagle": other_eagle, "for-target": for_target}  # fmt: skip
    return {**models, **{name: str(path) for name, path in found.items()}}


def run(world, command: str, method: str, flags: dict[str, str], output) -> int:
    """`flags`: flag -> the name of a model of `world`."""
    words = [*draft_words({"target": world["target"], **{flag: world[name] for flag, name in flags.items()}})]
    words += ["--max-new-tokens", "6"]
    if command == "decode":
        return main(["decode", "Hi", "--method", method, *words])
    return main(
        ["eval", "bench", "--methods", method, *words, "--data", world["data"], "--output", str(output),
         "--repeats", "1", "--limit", "1"]
    )  # fmt: skip


DRAFT, EAGLE = {"draft": "draft"}, {"eagle": "eagle"}
WRONG = [
    # A model or a head is missing: its flag is named.
    ("spec", {}, "--head"),
    ("hsddw", DRAFT, "--mid"),
    # Settings out of range.
    ("spec:k=0", DRAFT, "k: found 0, expected a whole number, 1 or more"),
    ("eagle-tree:nodes=40:depth=1:topk=5", EAGLE, "nodes: found 40, expected a whole number from 1 to 30"),
    # Models that speak other tokens than the target.
    ("spec", {"draft": "foreign"}, "head: found .*foreign with tokenizer"),
    # Heads of other models.
    ("eagle", {"target": "narrow", **EAGLE}, "width 32, expected width 16"),
    ("eagle", {"eagle": "acceptance"}, "an acceptance head, expected a model or head that drafts"),
    ("specdec++", {"draft": "other", "acceptance": "acceptance"}, "trained for another model"),
    # The head reads the EAGLE head's states: one for a draft model, for the target itself or for another EAGLE head
    # does not fit although all have its width.
    ("specdec++:drafter=eagle", {**EAGLE, "acceptance": "other-eagle"}, r"trained for another model \(eagle differ"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_does_not_fit_is_one_line_and_exit_code_2(world, tmp_path, capsys, number):
    method, flags, expected = WRONG[number]
    command = ("bench", "decode")[number % 2]  # both load models by the same code
    capsys.readouterr()  # what making the models said
    assert run(world, command, method, flags, tmp_path) == 2
    err = capsys.readouterr().err
    # field: found, expected. remedy
    assert re.fullmatch(r"draftsmith: error: [^\n]+: found [^\n]+, expected [^\n]+\. \S[^\n]+\n", err), err
    assert re.search(expected, err), err


def test_an_acceptance_head_for_an_eagle_head_decodes(world, tmp_path):
    flags = {**EAGLE, "acceptance": "for-eagle"}
    assert run(world, "bench", "specdec++:drafter=eagle:max=4", flags, tmp_path) == 0
    assert run(world, "decode", "specdec++:drafter=eagle:max=4", flags, tmp_path) == 0


def test_one_acceptance_head_does_not_serve_two_drafters(world, tmp_path, capsys):
    flags = {**DRAFT, **EAGLE, "acceptance": "acceptance"}
    assert run(world, "bench", "specdec++,specdec++:drafter=eagle", flags, tmp_path) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "expected one drafter for --acceptance" in err

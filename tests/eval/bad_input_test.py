"""Models and heads that do not fit each other: one line and exit code 2, from `eval bench` and from `decode` alike."""

from __future__ import annotations

import re
import shutil

import pytest
from worlds import CONTEXT, draft_words, varied_acceptance_head

from draftsmith.benchmarks.embedded.tokenizer import train_tokenizer
from draftsmith.launch.cli import main
from draftsmith.modules.pretrained.heads import drafter_identity, save_head
from draftsmith.modules.pretrained.models import load_lm


@pytest.fixture(scope="module")
def world(models, tmp_path_factory) -> dict[str, str]:
    """`models`, and what does not fit them."""
    root = tmp_path_factory.mktemp("unfitting")
    # The size is the same, the words are not.
    foreign = shutil.copytree(models["draft"], root / "foreign")
    train_tokenizer(["While the queue is empty, wait: nobody reads it."] * 4, 2048, CONTEXT).save_pretrained(
        str(foreign)
    )
    identity, head = drafter_identity(models["eagle"], load_lm(models["target"])), varied_acceptance_head(32)
    for_eagle = save_head(root / "for-eagle", head, {"target": identity}, "card")
    other_eagle = save_head(root / "other-eagle", head, {"target": {**identity, "eagle": "0" * 16}}, "card")
    return {**models, "foreign": str(foreign), "for-eagle": str(for_eagle), "other-eagle": str(other_eagle)}


def run(world, command: str, method: str, flags: dict[str, str], output) -> int:
    """`flags`: flag -> the name of a model of `world`."""
    words = draft_words({"target": world["target"], **{flag: world[name] for flag, name in flags.items()}})
    words += ["--max-new-tokens", "6"]
    if command == "decode":
        return main(["decode", "Hi", "--method", method, *words])
    words += ["--methods", method, "--data", world["data"], "--output", str(output), "--repeats", "1", "--limit", "1"]
    return main(["eval", "bench", *words])


# A head that reads an EAGLE head's states does not fit another one, although all have its width.
FOR_EAGLE = {"eagle": "eagle", "acceptance": "other-eagle"}
WRONG = [
    ("bench", "spec", {"draft": "foreign"}, "head: found .*foreign with tokenizer"),
    ("decode", "specdec++:drafter=eagle", FOR_EAGLE, r"trained for another model \(eagle differ"),
]


@pytest.mark.parametrize(("command", "method", "flags", "expected"), WRONG)
def test_what_does_not_fit_is_one_line_and_exit_code_2(world, tmp_path, capsys, command, method, flags, expected):
    capsys.readouterr()  # what making the models said
    assert run(world, command, method, flags, tmp_path) == 2
    err = capsys.readouterr().err
    # field: found, expected. remedy
    assert re.fullmatch(r"draftsmith: error: [^\n]+: found [^\n]+, expected [^\n]+\. \S[^\n]+\n", err), err
    assert re.search(expected, err), err


@pytest.mark.parametrize("command", ["bench", "decode"])
def test_an_acceptance_head_for_an_eagle_head_decodes(world, tmp_path, command):
    flags = {"eagle": "eagle", "acceptance": "for-eagle"}
    assert run(world, command, "specdec++:drafter=eagle:max=4", flags, tmp_path) == 0

"""`draftsmith refresh`: heads, targets, data and prompts that do not belong together, and recipes that are none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from bad_input.row import Ground, Row
from tiny_models import tiny_llama_dir

ON = "--target {target} --data {responses} --prompts embedded:prompts --split test --limit 2 --output {out} "
REFRESH = f"refresh {{eagle}} {ON}"


def another(**sizes: int) -> Callable[[Ground, Path], dict[str, object]]:
    return lambda ground, folder: {"other": tiny_llama_dir(folder / "other", **sizes)}


def other_tokens(ground: Ground, folder: Path) -> dict[str, object]:
    """Two tokens change their places, and the head says which tokenizer it knows."""
    other = ground.copy("target", folder)
    file = json.loads((other / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    first, second = [token for token, number in vocab.items() if number in (100, 101)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(file))
    return {"other": other, "head": shutil.copytree(ground.eagle_run / "best", folder / "head")}


def recipe(text: str) -> Callable[[Ground, Path], dict[str, object]]:
    def make(ground: Ground, folder: Path) -> dict[str, object]:
        (folder / "recipe.yaml").write_text(text)
        return {"recipe": folder / "recipe.yaml"}

    return make


ROWS = [
    Row("no head", f"refresh ./nosuch {ON}", ("head", "nosuch", "a head directory")),
    Row("a model", f"refresh {{draft}} {ON}", ("head", "a head directory")),
    Row("an acceptance head", f"refresh {{acceptance}} {ON}", ("acceptance head", "a drafter")),
    Row("no target", REFRESH.replace("{target}", "./nosuch"), ("./nosuch",)),
    Row("a wider target", REFRESH.replace("{target}", "{other}"), ("width 32", "width 64"),
        another(layers=3, hidden=64)),
    Row("a larger vocabulary", REFRESH.replace("{target}", "{other}"), ("vocabulary", "400"),
        another(layers=3, vocab=400)),
    Row("another tokenizer", REFRESH.replace("{target}", "{other}").replace("{eagle}", "{head}"),
        ("head", "another tokenizer", "a new head"), other_tokens),
    Row("data of the target before", REFRESH.replace("{target}", "{other}"), ("responses", "made with another"),
        another(layers=3, seed=7)),
    Row("prompts for data", REFRESH.replace("{responses}", "{prompts}"), ("prompts",)),
    Row("no data", REFRESH.replace("{responses}", "./nosuch"), ("nosuch", "directory")),
    Row("no prompts", REFRESH.replace("embedded:prompts", "./nosuch.jsonl"), ("nosuch.jsonl",)),
    Row("prompts that it learned", REFRESH.replace("embedded:prompts --split test", "{chats}"),
        ("prompts", "2, all of which are in the data")),
    Row("no tokens drafted", REFRESH + "--k 0", ("k", "0")),
    Row("a gain beyond all", REFRESH + "--worth 2", ("worth", "2.0")),
    Row("no temperature", REFRESH + "--temperatures ,", ("temperatures",)),
    Row("a negative temperature", REFRESH + "--temperatures -1", ("temperature", "-1")),
    Row("no recipe", REFRESH + "--recipe ./nosuch.yaml", ("nosuch.yaml",)),
    Row("a recipe of something else", REFRESH + "--recipe {recipe}", ("recipe.yaml", "leraning_rate", "settings of"),
        recipe("leraning_rate: 1")),
    Row("no share of the learning rate", REFRESH + "--recipe {recipe}", ("lr_share", "0"), recipe("lr_share: 0")),
    Row("a recipe out of range", REFRESH + "--recipe {recipe}", ("val_share", "2"), recipe("val_share: 2")),
    Row("a recipe that is a list", REFRESH + "--recipe {recipe}", ("recipe.yaml", "list"), recipe("- lr")),
]  # fmt: skip

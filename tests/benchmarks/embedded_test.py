"""What ships in data/embedded, and the scripts that made it: prompts, texts, tasks and models."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

import draftsmith.data.embedded as embedded
from draftsmith.benchmarks.embedded import build, card
from draftsmith.benchmarks.embedded.card import rates, score_pair
from draftsmith.benchmarks.embedded.corpus import (
    Function,
    content_key,
    parse_function,
    read_corpus,
    split_of,
)
from draftsmith.benchmarks.embedded.domains import DOMAINS, Domain, DraftRecipe
from draftsmith.benchmarks.embedded.language_model import (
    Recipe,
    evaluate,
    grow,
    init_weights,
)
from draftsmith.benchmarks.embedded.prose import PROSE_TASKS, Documented, plain, sentences, turns_of
from draftsmith.benchmarks.embedded.tasks import EDIT_TASKS, FUNCTION_TASKS, HEADLINE_TASKS
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.pretrained.checkpoint import load_tokenizer
from draftsmith.modules.pretrained.models import load_lm

ROOT = Path(embedded.__file__).parent
ROOTS = {"edits": ROOT, "prose": ROOT / "prose"}
TASKS = {"edits": (*HEADLINE_TASKS, "complete"), "prose": PROSE_TASKS}
ROWS = {
    domain: [json.loads(line) for line in (root / "prompts.jsonl").read_text().splitlines()]
    for domain, root in ROOTS.items()
}
CARDS = {domain: json.loads((root / "card.json").read_text()) for domain, root in ROOTS.items()}
EVERY_DOMAIN = pytest.mark.parametrize("domain", DOMAINS)


@EVERY_DOMAIN
def test_prompts_come_in_three_splits_with_their_origin(domain):
    rows = ROWS[domain]
    assert 3700 <= len(rows) <= 3900
    assert set(Counter(row["split"] for row in rows)) == {"train", "dev", "test"}
    assert {row["task"] for row in rows} == set(TASKS[domain])
    assert all(row["licence"] == DOMAINS[domain].sources[row["package"]] for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)


def test_a_prompts_split_follows_from_the_content_of_its_function():
    checked = 0
    for row in ROWS["edits"]:
        key = row["id"].removeprefix(f"{row['task']}-")
        assert split_of(key) == row["split"]
        if row["task"] in ("remove_docstring", "remove_type_hints"):  # the answer is the function as it was cut
            assert content_key(parse_function(row["answer"])) == key
            checked += 1
    assert checked > 300


@EVERY_DOMAIN
def test_no_function_and_no_docstring_is_in_two_splits(domain):
    splits = defaultdict(set)
    for row in ROWS[domain]:
        splits[row["id"].removeprefix(f"{row['task']}-")].add(row["split"])
    assert all(len(found) == 1 for found in splits.values())


def test_no_sentence_of_a_held_out_answer_is_in_a_training_answer():
    train, held_out = (
        set().union(*(sentences(row["answer"]) for row in ROWS["prose"] if (row["split"] == "train") is training))
        for training in (True, False)
    )
    assert len(train) > 3000 and len(held_out) > 500 and not train & held_out


def test_everything_shipped_is_small():
    """A head at most 25 MB, and the package below the 100 MB of the Python index."""
    sizes = {file: file.stat().st_size for file in ROOT.rglob("*") if file.is_file()}
    assert sum(sizes.values()) <= 65e6 and max(sizes.values()) <= 25e6


@pytest.mark.slow
@EVERY_DOMAIN
def test_a_build_makes_what_ships(domain, tmp_path, monkeypatch):
    """Of two small packages, in a few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(build.DOMAINS, domain, shortened(build.DOMAINS[domain]))
    small = {"DISTIL_PROMPTS": 4, "SHIPPED_PROMPTS": {"train": 20, "dev": 9, "test": 18}, "CARD_PROMPTS": 1}
    for name, value in small.items():
        monkeypatch.setattr(build, name, value)
    monkeypatch.setattr(card, "MAX_NEW_TOKENS", 4)
    # Held-out losses of a batch, not of twenty.
    monkeypatch.setattr(build, "evaluate", functools.partial(evaluate, max_batches=1))
    out = build.run(build.BuildConfig(Path("out"), domain, num_threads=1, packages=["rich", "jinja2"]))
    root, made = ROOTS[domain], ("target", *DOMAINS[domain].drafts)
    shipped = [path for name in made for path in (root / name).iterdir()]
    shipped += [root / name for name in ("prompts.jsonl", "card.json")]
    assert all((out / path.relative_to(root)).is_file() for path in shipped)
    assert load_lm(str(out / "draft")).info.num_layers == DOMAINS[domain].drafts["draft"].num_layers
    rows = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert set(rows[0]) == set(ROWS[domain][0]) and {row["split"] for row in rows} == {"train", "dev", "test"}
    assert {row["package"] for row in rows} == {"rich", "jinja2"}


def shortened(stage):
    """A stage of training, of one step."""
    if isinstance(stage, Domain):
        stages, drafts = ({k: shortened(v) for k, v in each.items()} for each in (stage.target_stages, stage.drafts))
        return dataclasses.replace(stage, target_stages=stages, drafts=drafts, by_heart=shortened(stage.by_heart))
    if isinstance(stage, Recipe):
        return dataclasses.replace(stage, steps=1, tokens_per_step=512)
    if isinstance(stage, tuple):
        return tuple(map(shortened, stage))
    if isinstance(stage, DraftRecipe):
        return dataclasses.replace(stage, start=shortened(stage.start), distil=shortened(stage.distil))
    return stage


@pytest.mark.slow
def test_a_few_held_out_prompts_give_what_the_card_claims():
    """An independent sample of the card's own measurement: 4 prompts a task, so wide margins."""
    target, draft = load_lm("embedded:target"), load_lm("embedded:draft")
    chosen = defaultdict(list)
    for task, row in build.card_questions(ROOT / "prompts.jsonl", load_tokenizer("embedded:target")):
        if task in EDIT_TASKS and len(chosen[task]) < 4:
            chosen[task].append((task, row))
    asked = [question for questions in chosen.values() for question in questions]
    measured, claimed = (
        rates(score_pair(target, draft, asked, seed=0), EDIT_TASKS),
        CARDS["edits"]["tasks"]["draft"]["all edits"],
    )
    # 28 prompts of about 100 tokens: three standard errors of a rate near 0.95 clustered by prompt.
    assert abs(measured["greedy_agreement"] - claimed["greedy_agreement"]) < 0.06
    assert abs(measured["alpha"] - claimed["alpha"]) < 0.08
    assert abs(measured["exact"] - claimed["exact"]) < 0.3


DOCSTRING = """Find the shortest route between two stations of the network.

The route is found by Dijkstra's algorithm with a binary heap.  Stations that are closed are left out, and ``None`` is
returned where no open route is left [1]_.

Trains that run late do not count here. Their delays are known only after :meth:`~Network.update` was called, which asks
the operator.

Parameters
----------
start : str
    Name of the station where the journey begins. It must be open on the day of the journey.
limit : int
    Hours.

Returns
-------
list of str
    Names of the stations in the order of travel, the first and the last of them included.

Examples
--------
>>> route("Bern", "Chur")
"""
ITEM = Documented("rail.route", "route(start, limit)", DOCSTRING, "rail")


def test_every_task_has_its_answer():
    made = {(task, prompt): answer for task, prompt, answer in turns_of(ITEM)}
    algorithm = (
        "The route is found by Dijkstra's algorithm with a binary heap. Stations that are closed are left out, and "
        "None is returned where no open route is left."
    )
    first = "Find the shortest route between two stations of the network."
    delays = "Their delays are known only after Network.update was called, which asks the operator."
    assert made == {
        ("describe", "What does route(start, limit) of rail do?"): f"{first} {algorithm}",
        ("details", f"Tell me more about rail.route. {first}"): f"Trains that run late do not count here. {delays}",
        ("parameter", "What is start of rail.route?"): (
            "Name of the station where the journey begins. It must be open on the day of the journey."
        ),
        ("returns", "What does rail.route return?"): (
            "Names of the stations in the order of travel, the first and the last of them included."
        ),
        ("continue", f"Go on: {algorithm.split('. ')[0]}."): f"{algorithm.split('. ')[1]}",
        ("continue", "Go on: Trains that run late do not count here."): delays,
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("See :class:`~torch.Tensor` and\n  ``dim`` [12]_.", "See torch.Tensor and dim."),
        ("Of **every** `row <https://x.org>`_, *not* a*b*c.", "Of every row, not a*b*c."),
        ("A [link](https://x.org/a) in `code`.", "A link in code."),
    ],
)
def test_markup_is_dropped(text, shown):
    assert plain(text) == shown


SOURCE = '''def area(width: int, height: int=1) -> int:
    """Area of a rectangle."""
    if width < 0:
        return 0
    return width * height'''


def function(source: str = SOURCE) -> Function:
    return Function(content_key(parse_function(source)), "area", source, "stdlib", "PSF-2.0")


def ask(task: str, source: str = SOURCE) -> tuple[str, str]:
    made = FUNCTION_TASKS[task](function(source), random.Random(0))
    assert made is not None
    return made


def test_rename_changes_every_use_of_one_argument_and_nothing_else():
    prompt, answer = ask("rename")
    old, new = prompt.split(":\n\n")[0].removeprefix("Rename ").split(" to ")
    assert old in ("width", "height")
    code = prompt.split("\n\n", 1)[1]
    # The words are whole identifiers here, so replacing text is an independent way to the same answer.
    assert answer == code.replace(old, new)


def test_a_function_is_in_one_split_whatever_its_docstring_hints_and_name():
    bare = "def other(width, height=1):\n    if width < 0:\n        return 0\n    return width * height"
    assert content_key(parse_function(SOURCE)) == content_key(parse_function(bare))
    assert content_key(parse_function(SOURCE)) != content_key(parse_function(bare.replace("0", "1")))


def test_corpus_is_deduplicated_licensed_and_stable():
    corpus = read_corpus(["rich", "jinja2"])
    keys = [item.key for item in corpus.functions]
    assert len(keys) == len(set(keys)) > 200
    assert {item.licence for item in corpus.functions} == {"MIT", "BSD-3-Clause"}
    assert read_corpus(["rich", "jinja2"]) == corpus


def test_growing_keeps_the_function():
    small = LlamaModel(LlamaConfig(40, 16, 24, 2, 2, 2, 8, 64, tie_embeddings=True))
    init_weights(small, 0)
    for name, param in small.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # zeros at the start: no test of anything
            torch.nn.init.normal_(param, 0, 0.2)
    ids = torch.randint(1, 40, (2, 12))
    # Identity layers add exact zeros to the residual stream; another order of operations is all that may differ.
    torch.testing.assert_close(grow(small, 5, seed=3)(ids), small(ids), atol=1e-5, rtol=0)

"""Replay of recorded answers against decoding: every branch of it, every round of it, and a whole run of the bench."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles.formulas import warped
from oracles.tables import PROMPT, LogitTable, enumerate_branches
from states_server import StatesServer
from worlds import run_models, small_models

from draftsmith.data.text.template import load_chat_tokenizer, prompt_ids
from draftsmith.eval.bench.replay import (
    RecordedAnswer,
    RecordedText,
    check_followed,
    make_drafters,
    read_recorded,
    replay_text,
)
from draftsmith.eval.settings import BenchConfig
from draftsmith.launch.cli import main
from draftsmith.modules import along
from draftsmith.modules.along import rounds_by_place
from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.drafters.method_names import parse_method, parse_methods
from draftsmith.modules.pretrained.checkpoint import Checkpoint, load_tokenizer
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import InputError, SamplingParams


def text_of(prompt, tokens, ends=(), room=1000) -> RecordedText:
    begin, end = len(prompt), len(prompt) + len(tokens)
    limit = begin + room if tokens[-1] in ends else end
    answer = RecordedAnswer(begin, end, limit, {"turn": 1, "task": ""}, ["prose"] * len(tokens))
    return RecordedText("id", [*prompt, *tokens], [answer])


def walks_of(methods: str, models, text: RecordedText, params: SamplingParams) -> dict:
    """Return the walk over the last answer of a text, by method."""
    named = parse_methods(methods)
    drafters, walks = make_drafters(named, models), {item.label: [] for item in named}
    replay_text(models.target, 0, text, params, drafters, walks)
    return {label: own[-1].walk for label, own in walks.items()}


@pytest.mark.parametrize("method", ["spec:k=1", "spec:k=2", "pld:k=2:ngram=1"])
@pytest.mark.parametrize(
    ("params", "ends"),
    [(SamplingParams(), ()), (SamplingParams(1.0), ()), (SamplingParams(0.8, 2), (1,)), (SamplingParams(1.0), (1,))],
)
def test_target_calls_of_an_answer_are_the_mean_over_every_branch_that_decodes_it(method, params, ends):
    models = run_models(LogitTable(1), LogitTable(2), capacity=64, ends=ends)
    sums, places = defaultdict(lambda: [0.0] * 4), defaultdict(lambda: torch.zeros(2, 2, dtype=torch.float64))

    def run(source):
        drafter = parse_method(method).build(models)
        return generate_one(models.target, drafter, list(PROMPT), params, 5, source, ends)

    for made, weight in enumerate_branches(run):
        numbers = 1.0, made.trace.num_target_calls, made.trace.num_accepted, made.trace.num_draft_tokens
        for place, number in enumerate(numbers):
            sums[tuple(made.tokens)][place] += weight * number
        for step in made.trace.steps:
            for row, count in enumerate((step.num_accepted, step.num_drafted)):
                places[tuple(made.tokens)][row, :count] += weight
    for tokens, (weight, calls, accepted, drafted) in sums.items():
        walk = walks_of(method, models, text_of(PROMPT, tokens, ends, room=5), params)[method]
        assert walk.calls[-1] == pytest.approx(calls / weight, abs=1e-9), tokens
        assert walk.visits @ walk.reached.sum(-1) == pytest.approx(accepted / weight, abs=1e-9), tokens
        # A longer draft may be cut by an end token behind a rejected one, which no replay reads.
        if not ends or method != "spec:k=2":
            assert walk.visits @ walk.drafted.sum(-1) == pytest.approx(drafted / weight, abs=1e-9), tokens
            by_place = rounds_by_place([walk])
            expected = places[tokens][:, : by_place.shape[1]] / weight
            torch.testing.assert_close(by_place, expected, rtol=0, atol=1e-9)
        assert walk.visits @ walk.drafted.sum(-1) >= drafted / weight - 1e-9, tokens


def test_drafts_go_on_behind_an_answers_end_but_not_to_the_last_token_allowed():
    """By hand: of ten tokens the answer takes three, and its end token, the first one's successor, is drafted by a
    copy of the target or never."""
    row = {"id": "x", "task": "", "turn": 1, "input_ids": [3, 4, 5, 6, 1], "loss_mask": [0, 0, 1, 1, 1]}
    row["labels"] = {}
    ends, cut = (RecordedText.of(row, ends, str, 10).answers[0].limit for ends in ((1,), ()))
    assert (ends, cut) == (12, 5)
    target = LogitTable(1)
    (made,) = [generate_one(target, None, list(PROMPT), SamplingParams(), 8, TorchSource(0), ())]
    end = made.tokens[2]
    models = run_models(target, LogitTable(1), capacity=64, ends=(end,))
    drafted = {
        room: walks_of("spec:k=4", models, text_of(PROMPT, made.tokens[:3], (end,), room), SamplingParams())["spec:k=4"]
        for room in (3, 4, 8)
    }
    # From the first place, where the only round begins: one token and the target's own; the end token too, and no more.
    assert [walk.drafted[0].sum() for walk in drafted.values()] == [1, 2, 2]
    assert [walk.reached[0].sum() for walk in drafted.values()] == [1, 2, 2]
    assert [walk.visits.tolist() for walk in drafted.values()] == [[1, 0]] * 3


def test_no_draft_leaves_the_heads_context():
    models, params = small_models(), SamplingParams(1.0)
    head, ids = models.heads["eagle"], [1 + i % 7 for i in range(30)]
    head.config = replace(head.config, llama=replace(head.config.llama, max_position=20))
    walk = walks_of("eagle:k=3", models, text_of(ids[:4], ids[4:]), params)["eagle:k=3"]
    # The k-th token of a draft behind n tokens stands at place n + k.
    assert [int(own) for own in walk.drafted.sum(-1)] == [3 if start + 3 <= 20 else 0 for start in range(5, 30)]


@pytest.mark.parametrize("name", ["spec", "eagle", "eagle3", "mtp", "medusa", "hydra", "dflash", "dflash2", "dspark"])
def test_every_head_drafts_as_in_decoding(name):
    """In each round, the distributions that the decoder drew from, of drafts that are the answer."""
    models, params, method, compared = small_models(), SamplingParams(1.3, 20), f"{name}:k=2", 0
    for seed in range(3):
        rounds = []
        drafter, options = parse_method(method).build(models), DecodeOptions(rounds.append)
        prompt = [3, 1, 4, 1 + seed, 5]
        made = generate_one(models.target, drafter, prompt, params, 30, TorchSource(seed), (), options)
        # Shorter drafts than the longest of the head, which a block head drafts otherwise.
        walk = walks_of(f"{method},{name}:k=3", models, text_of(prompt, made.tokens), params)[method]
        begin = 1
        for done in rounds[1:]:
            expected, odds, depth = 1.0, 1.0, min(len(done.tree.tokens), done.num_accepted + 1, 30 - begin)
            for place in range(depth):
                x = made.tokens[begin + place]
                p, q = warped(done.logits[place], params)[x], float(done.tree.draft_prob[place][x])
                odds *= q / p
                expected = min(expected, odds)
                assert walk.reached[begin - 1, place] == pytest.approx(expected, abs=1e-4)
                compared += 1
            begin += len(done.tokens)
    assert compared > 60


def test_a_later_answer_is_replayed_behind_the_earlier_ones():
    models, params = small_models(), SamplingParams(1.0)
    labels = {"turn": 1, "task": ""}
    first, ids = RecordedAnswer(3, 8, 8, labels, ["prose"] * 5), [1, 2, 3, 4, 1, 2, 3, 1, 5, 6, 1, 2, 3, 4, 1, 2, 3]
    alone = text_of(ids[:11], ids[11:])
    both = RecordedText("id", ids, [first, *alone.answers])
    methods = "spec:k=3,eagle3:k=3,dspark:k=3,hydra:k=3,pld:k=3"
    walks = [walks_of(methods, models, text, params) for text in (alone, both)]
    for label, walk in walks[0].items():
        assert walks[1][label].calls == pytest.approx(walk.calls, abs=1e-5) and walk.calls[-1] < 6, label


def test_answers_of_other_sampling_are_refused():
    models = small_models()
    read = {}
    for true in (SamplingParams(), SamplingParams(1.0)):
        texts = []
        for seed in range(12):
            prompt = [seed, 7, 9]
            made = generate_one(models.target, None, prompt, true, 50, TorchSource(seed), ())
            texts.append(text_of(prompt, made.tokens))
        for params in (SamplingParams(), SamplingParams(1.0), SamplingParams(0.5)):
            read[true, params] = [along.read(models.target, text.ids, text.answers, params, ()) for text in texts]
    for (true, params), seen in read.items():
        if true == params:
            check_followed(seen)
            continue
        with pytest.raises(InputError, match="replay: found"):
            check_followed(seen)


METHODS = "spec:k=1,spec:k=3,eagle:k=2,pld:k=4"


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> tuple[dict, dict, Path]:
    """Greedy answers of the bench, and of `data responses` to the same prompts, replayed."""
    root = tmp_path_factory.mktemp("replay")
    target, drafts = f"--target={models['target']}", [f"--head={models['draft']}", f"--head={models['eagle']}"]
    bench = ["eval", "bench", target, *drafts, f"--methods={METHODS}"]
    asked = ["--max-new-tokens=40", "--ignore-eos", "--temperature=0"]
    prompts = ["data", "prompts", target, f"--source={models['data']}", f"--output={root / 'prompts'}"]
    assert main(prompts) == 0
    assert main(["data", "responses", target, f"--data={root / 'prompts'}", f"--output={root / 'a'}", *asked]) == 0
    assert main([*bench, f"--data={root / 'prompts'}", "--repeats=1", f"--output={root / 'decoded'}", *asked]) == 0
    assert main([*bench, f"--replay={root / 'a'}", f"--output={root / 'replayed'}"]) == 0
    found = [json.loads((root / name / "results.json").read_text()) for name in ("decoded", "replayed")]
    return found[0], found[1], root


def test_greedy_replay_is_the_decoders_walk(runs):
    decoded, replayed, _ = runs
    rows = {row["method"]: row for row in decoded["methods"]}
    assert [row["method"] for row in replayed["methods"]] == METHODS.split(",")
    for row in replayed["methods"]:
        own = rows[row["method"]]
        names = ("prompts", "tokens", "num_target_calls", "num_draft_tokens", "num_accepted", "tau", "acceptance_rate")
        assert {name: row[name] for name in names} == {name: own[name] for name in names}
        assert row["accepted_by_place"] == pytest.approx(own["accepted_by_place"])
        for name in ("context", "turn", "kind"):
            assert row["by"][name] == own["by"][name]
        for mine, theirs in zip(row["by"]["task"], own["by"]["task"], strict=True):
            assert (mine["name"], mine["tau"]) == (theirs["name"], theirs["tau"])
    assert rows["spec:k=3"]["tau"] > 1.2 and all(row["tau"] > 1 for row in replayed["methods"]), "nothing is compared"
    by_length = next(row["by"]["draft_length"] for row in replayed["methods"] if row["method"] == "spec:k=3")
    assert by_length[0]["tau"] == rows["spec:k=1"]["tau"]
    assert replayed["meta"]["kind"] == "replay" and not any("speedup" in row for row in replayed["methods"])


def test_a_server_may_run_the_target(runs, models, tmp_path):
    words = ["eval", "bench", f"--target={models['target']}", f"--replay={runs[2] / 'a'}", f"--methods={METHODS}"]
    words += [f"--head={models['draft']}", f"--head={models['eagle']}", f"--output={tmp_path / 'out'}"]
    with StatesServer(load_lm(models["target"]), (), tmp_path / "states") as server:
        assert main([*words, f"--server={server.url}"]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    assert [row["tau"] for row in found] == [row["tau"] for row in runs[1]["methods"]]


def test_a_file_of_chats_has_the_last_turns_answers(models, tmp_path, capsys):
    said = [("user", "What?"), ("assistant", "first"), ("user", "Rename a to b:"), ("assistant", "def add(b):")]
    chat = {
        "id": "x",
        "task": "t",
        "language": "en",
        "messages": [{"role": role, "content": text} for role, text in said],
    }
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(chat) + "\n")
    config = BenchConfig(
        target=models["target"], replay=str(file), temperature="1", by="language", output=tmp_path / "out"
    )
    (text,), params = read_recorded(config, Checkpoint(config.target))
    (answer,), tokenizer = text.answers, load_tokenizer(models["target"])
    assert (text.id, answer.labels, params.temperature) == ("x", {"turn": 2, "task": "t", "language": "en"}, 1.0)
    assert text.ids[: answer.begin] == prompt_ids(load_chat_tokenizer(models["target"]), chat["messages"][:3])
    assert tokenizer.decode(text.ids[answer.begin : answer.end]).startswith("def add(b):")
    # No random model says this.
    words = ["eval", "bench", f"--target={models['target']}", f"--replay={file}", f"--output={tmp_path / 'out'}"]
    assert main([*words, "--methods=pld"]) == 2
    assert "replay: found" in capsys.readouterr().err and not (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--methods=eagle-tree"], "methods: found eagle-tree"),
        (["--methods=ar"], "methods: found ar"),
        (["--methods=pld", "--repeats=2"], "repeats: found 2"),
        (["--methods=pld", "--temperature=1"], "temperature: found 1"),
        (["--methods=eagle:k=99999999"], "k: found"),
    ],
)
def test_what_replay_does_not_read_is_refused(runs, models, words, named, capsys, tmp_path):
    base = ["eval", "bench", f"--target={models['target']}", f"--head={models['eagle']}", f"--output={tmp_path / 'o'}"]
    assert main([*base, f"--replay={runs[2] / 'a'}", *words]) == 2
    assert named in capsys.readouterr().err

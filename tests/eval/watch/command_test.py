"""`draftsmith watch` beside servers that count as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from servers import Server

from draftsmith.eval.watch.evidence import CardAnswers
from draftsmith.launch.cli import main
from draftsmith.modules.drafters.eagle import EagleConfig, EagleHead
from draftsmith.modules.llama_config import LlamaConfig
from draftsmith.modules.pretrained.card import write_measured
from draftsmith.modules.pretrained.heads import head_fields, save_head

from .evidence_test import AT_ONCE, PLACES, answers

RNG = np.random.default_rng(7)
CARD, HEALTHY, FALLEN = answers(300, RNG), answers(2000, RNG), answers(2000, RNG, fall=0.15)


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("head")
    eagle = EagleHead(EagleConfig(LlamaConfig(50, 8, 16, 1, 2, 1, 4, 64, rope_theta=5e5)))
    save_head(directory, eagle, {"head": head_fields(eagle)}, "A card.")
    measure(directory, CARD)
    return str(directory)


def measure(directory: Path, card: CardAnswers, length: int = PLACES) -> None:
    counts = {"drafts": card.drafts.astype(int).tolist(), "accepted": card.accepted.astype(int).tolist()}
    row = {"method": f"eagle:k={length}", "temperature": 0.0, "tau": 2.0, "prompts": 300, "tokens": 9, "speedup": 1.5}
    measured = {
        "settings": {"target": "t", "top_k": 0, "top_p": 1.0, "max_new_tokens": 64, "dtype": "float32"},
        "methods": [{**row, "by": {}, "answers": counts}],
        **{"prompts": {"source": "F", "count": 300, "sha256": "9"}, "clock": "cpu", "hardware": {"cpu": "a CPU"}},
        **{"date": "today", "git_commit": "1234"},
    }
    write_measured(directory, measured)


def page(served: CardAnswers, count: int, running: int = 0, started: str = "1.7e9") -> str:
    """What vLLM counts after so many answers. started: Unix time of its process; empty if it does not say."""
    labels, sums = 'engine="0",model_name="m"', served.accepted[:count].sum(0)
    lines = [
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {served.drafts[:count].sum()}",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {PLACES * served.drafts[:count].sum()}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {sums.sum()}",
        f'vllm:request_success_total{{{labels},finished_reason="stop"}} {count - running}.0',
        f"vllm:num_requests_running{{{labels}}} {running}.0",
        *(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{n}"}} {own}'
            for n, own in enumerate(sums)
        ),
    ]
    return "\n".join([*lines, f"process_start_time_seconds {started}" if started else "", ""])


def codes_of(head: str, pages: Sequence[str], *options: str) -> list[int]:
    """The exit codes of as many looks as there are pages."""
    left = iter(pages)
    with Server(lambda request: next(left).encode()) as server:
        return [main(["watch", "--server", server.url, "--head", head, "--once", *options]) for _ in pages]


def watched(head: str, pages: Sequence[str], *options: str) -> int:
    """The exit code of the last look."""
    return codes_of(head, pages, *options)[-1]


def test_looks_that_a_state_file_joins_find_a_fall_and_nothing_else(head, tmp_path, capsys):
    counts = range(200, 1001, 200)
    for served, code, said in ((HEALTHY, 0, "as measured"), (FALLEN, 1, "below what was measured (p ")):
        state = tmp_path / f"{code}.json"
        pages = [page(served, count, running=3) for count in counts]
        assert watched(head, pages, "--state", str(state)) == code
        printed = capsys.readouterr().out.splitlines()
        assert any(line.startswith(said) for line in printed[-3:])
        saved = json.loads(state.read_text())
        assert saved["looks"][-1][1:3] == [1000, served.drafts[:1000].sum()]
    tau = 1 + FALLEN.accepted[:1000].sum() / FALLEN.drafts[:1000].sum()
    assert f"{tau:.3f}" in "".join(printed) and f"{CARD.tau:.3f}" in "".join(printed)


def test_saved_pages_say_the_same_as_the_server_and_json_has_the_numbers(head, tmp_path, capsys):
    pages = [page(FALLEN, count) for count in range(AT_ONCE, 401, AT_ONCE)]
    (tmp_path / "pages.txt").write_text("".join(pages))
    code = main(["watch", "--counters", str(tmp_path / "pages.txt"), "--head", head, "--json"])
    saved = json.loads(capsys.readouterr().out)
    assert code == saved["exit_code"] == 1 and saved["p_fall"] < 1e-3 and saved["p_rise"] == 1
    assert watched(head, pages, "--state", str(tmp_path / "state.json"), "--json") == 1
    last = json.loads(capsys.readouterr().out.rpartition("\n{")[2].join(["{", ""]))
    assert last["p_fall"] == saved["p_fall"] and last["tables"][0]["rows"] == saved["tables"][0]["rows"]


def test_a_late_fall_is_shown_by_the_answers_since_then(head, tmp_path, capsys):
    both = zip((HEALTHY.drafts, HEALTHY.accepted), (FALLEN.drafts, FALLEN.accepted), strict=True)
    served = CardAnswers(*(np.concatenate([own[:1000], fallen[:600]]) for own, fallen in both))
    pages = [page(served, AT_ONCE * number) for number in range(1, 1600 // AT_ONCE + 1)]
    (tmp_path / "pages.txt").write_text("".join(pages))
    code = main(["watch", "--counters", str(tmp_path / "pages.txt"), "--head", head, "--json"])
    said = json.loads(capsys.readouterr().out)["verdict"]
    assert code == 1 and 500 < int(said.partition("in the last ")[2].split()[0]) < 700
    found = FALLEN.accepted[:600].sum() / FALLEN.drafts[:600].sum()
    assert abs(float(said.partition("tau ")[2].split()[0]) - 1 - found) < 0.03


def test_drafts_of_answers_that_end_inside_a_draft_are_counted(head, tmp_path, capsys):
    """llama.cpp says no drafts, and counts tokens behind the end of an answer as accepted."""
    replies = []
    for drafts, accepted in zip(CARD.drafts[:60], CARD.accepted.sum(1)[:60], strict=True):
        counts = {"draft_n": int(PLACES * drafts), "draft_n_accepted": int(accepted)}
        replies.append({"timings": {"predicted_n": int(1 + drafts + accepted) - 2, **counts}})
    saved = tmp_path / "answers.jsonl"
    saved.write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    assert main(["watch", "--counters", str(saved), "--head", head, "--json"]) == 0
    served = json.loads(capsys.readouterr().out)["tables"][0]["rows"][1]
    assert served["answers"] == 60 and served["drafts"] == CARD.drafts[:60].sum()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda text: text.replace(f'position="{PLACES - 1}"', 'position="a"'), "expected counts"),
        (
            lambda text: "".join(line for line in text.splitlines(True) if f'"{PLACES - 1}"' not in line),
            "drafts 2 tokens",
        ),
        (
            lambda text: "".join(line for line in text.splitlines(True) if "request_success" not in line),
            "does not count answers",
        ),
        (lambda text: text.replace(f" {PLACES * HEALTHY.drafts[:200].sum()}", " 1000.0"), "ends drafts early"),
    ],
    ids=["no number", "another length", "no answers", "drafts end early"],
)
def test_what_cannot_be_compared_is_said(head, wrong, said, capsys):
    code = watched(head, [wrong(page(HEALTHY, 200))])
    printed = capsys.readouterr()
    assert said in printed.out + printed.err and code in (2, 3)


def test_a_state_of_another_card_and_a_server_that_is_gone_are_refused(head, tmp_path, capsys):
    state = tmp_path / "state.json"
    assert watched(head, [page(HEALTHY, 100)], "--state", str(state)) == 0
    assert main(["watch", "--server", "http://127.0.0.1:9", "--head", head, "--once"]) == 2
    assert "no connection" in capsys.readouterr().err
    measure(Path(head), CardAnswers(CARD.drafts[1:], CARD.accepted[1:]))
    try:
        assert watched(head, [page(HEALTHY, 200)], "--state", str(state)) == 2
        assert "of another card" in capsys.readouterr().err
    finally:
        measure(Path(head), CARD)


def test_another_draft_length_is_named_where_it_is_faster_for_what_is_accepted_now(head, tmp_path, capsys):
    shares = (HEALTHY.accepted.sum(0) / HEALTHY.drafts.sum()).tolist()
    # Seconds of a round by its drafted tokens, which cost much with one request at once, and little with four.
    seconds = {1: {0: 1.0, 1: 1.2, 3: 2.0}, 4: {0: 4.0, 1: 4.1, 3: 4.2}}
    rows = [
        {
            **{"requests": load, "num_drafted": k, "p_min": 0.0, "accepted_by_place": shares[:k]},
            "tokens_per_s": load * (1 + sum(shares[:k])) / own,
        }
        for load, by_length in seconds.items()
        for k, own in by_length.items()
    ]
    (tmp_path / "results.json").write_text(json.dumps({"meta": {}, "rows": rows}))
    assert watched(head, [page(HEALTHY, 1000)], "--served", str(tmp_path)) == 0
    speeds = {
        k: (1 + HEALTHY.accepted[:1000].sum(0)[:k].sum() / HEALTHY.drafts[:1000].sum()) / own
        for k, own in seconds[1].items()
    }
    assert max(speeds, key=lambda k: speeds[k]) == 1
    said = f"Another draft length would be faster: drafts of 1 by {speeds[1] / speeds[3] - 1:.0%} with 1 at once\n"
    assert said in capsys.readouterr().out


def test_a_fall_of_counts_is_no_verdict_until_looks_tell_what_it_was(head, tmp_path, capsys):
    state = str(tmp_path / "state.json")
    before, after = page(HEALTHY, 300, started=""), [page(FALLEN, count, started="") for count in range(200, 1401, 100)]
    codes = codes_of(head, [before, *after], "--state", state)
    assert codes[:11] == [0, *[3] * 10] and codes[-1] == 1
    assert "counts fell" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("300.0", "0.0"), "0 answers so far, of at least 30"),
        (lambda text: text.replace('position="0"} ', 'position="0"} 9'), "more tokens were accepted than drafted"),
        (lambda text: text.replace('position="1"} ', 'position="1"} 1'), "more of a later place"),
    ],
    ids=["none finished", "more than drafts", "more of a later place"],
)
def test_counts_that_show_nothing_or_cannot_be_are_no_verdict(head, change, said, capsys):
    assert watched(head, [change(page(HEALTHY, 300))]) == 3
    assert said in capsys.readouterr().out


def test_sglangs_draft_length_is_that_of_its_gauge(head, capsys):
    drafts, accepted = HEALTHY.drafts[:300].sum(), HEALTHY.accepted[:300].sum()
    labels = 'engine_type="unified",model_name="m",tp_rank="0"'
    for steps, code, said in ((PLACES, 0, "as measured"), (PLACES - 1, 3, f"drafts {PLACES - 1} tokens")):
        counts = {"spec_verify_calls_total": drafts, "generation_tokens_total": drafts + accepted + 300}
        counts |= {"num_requests_total": 300, "spec_num_steps": steps}
        text = "\n".join(f"sglang:{name}{{{labels}}} {count}" for name, count in counts.items())
        assert watched(head, [text]) == code
        assert said in capsys.readouterr().out

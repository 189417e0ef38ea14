"""What a server counted is what its answers were: pages of real servers, cut to the lines that matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.watch.counters import TRIAL, EngineCounts, Snapshot, Tally, read_page, read_pages, read_saved
from draftsmith.modules.types import InputError

# vLLM 0.32 with the shipped head for SmolLM2 and three drafted tokens, in the middle of 24 questions, and after them.
VLLM = """# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79600835079e+09
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="smollm2"} 288.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="smollm2"} 1.7960084050542204e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="smollm2"} 864.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="smollm2"} 277.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="0"} 146.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="1"} 81.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="2"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="smollm2",position="0"} 1.796008405054293e+09
vllm:num_requests_running{engine="0",model_name="smollm2"} 4.0
vllm:generation_tokens_total{engine="0",model_name="smollm2"} 576.0
vllm:generation_tokens_created{engine="0",model_name="smollm2"} 1.7960084050548544e+09
vllm:request_success_total{engine="0",finished_reason="stop",model_name="smollm2"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="smollm2"} 6.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="smollm2"} 0.0
vllm:request_success_created{engine="0",finished_reason="stop",model_name="smollm2"} 1.7960084050548718e+09
vllm:request_generation_tokens_bucket{engine="0",le="+Inf",model_name="smollm2"} 9.0
vllm:request_generation_tokens_sum{engine="0",model_name="smollm2"} 361.0
"""
AFTER = {"} 288.0": "} 721.0", "} 864.0": "} 2163.0", "} 277.0": "} 810.0", "} 146.0": "} 409.0", "} 81.0": "} 237.0"}
AFTER |= {"} 50.0": "} 164.0", "} 4.0": "} 0.0", "} 576.0": "} 1532.0", "} 3.0": "} 8.0", "} 6.0": "} 17.0"}
# llama.cpp with the same head after 16 answers, and of each its tokens, drafted and accepted tokens.
LLAMACPP = """# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 628
llamacpp:tokens_predicted_seconds_total 35.7774
llamacpp:spec_decode_num_draft_tokens_total 720
llamacpp:spec_decode_num_accepted_tokens_total 361
llamacpp:spec_decode_num_drafts_total 246
llamacpp:requests_processing 0
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 156
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 117
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 88
"""
# Before its first answer llama.cpp counts no places.
FRESH = "llamacpp:tokens_predicted_total 0\nllamacpp:spec_decode_num_draft_tokens_total 0\n"
FRESH += "llamacpp:spec_decode_num_accepted_tokens_total 0\nllamacpp:spec_decode_num_drafts_total 0\n"
ANSWERS = [(60, 69, 35), (23, 30, 11), (40, 39, 25), (60, 69, 36)] * 2
ANSWERS += [
    (23, 24, 13),
    (26, 36, 14),
    (60, 61, 37),
    (23, 24, 13),
    (40, 50, 22),
    (27, 36, 16),
    (23, 18, 14),
    (40, 57, 18),
]
# SGLang's own collector after answers of 41 and 17 tokens in 20 and 9 verifications.
SGLANG = r"""process_start_time_seconds 1.79601074321e+09
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="a \"quoted\", {name}"} 41.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="a \"quoted\", {name}"} 17.0
sglang:spec_verify_calls_total{engine_type="unified",model_name="a \"quoted\", {name}"} 29.0
sglang:spec_verify_calls_created{engine_type="unified",model_name="a \"quoted\", {name}"} 1.7960107731294234e+09
sglang:num_requests_total{engine_type="unified",is_streaming="true",model_name="a \"quoted\", {name}"} 1.0
sglang:num_requests_total{engine_type="unified",is_streaming="false",model_name="a \"quoted\", {name}"} 1.0
sglang:spec_accept_length{engine_type="unified",model_name="a \"quoted\", {name}"} 2.5
"""


def changed(page: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in page
        page = page.replace(old, new)
    return page


def vllm(drafts: int, accepted: tuple[int, ...] = (), started: float | None = None, **labels: str) -> str:
    """Return a page of an engine that has finished a tenth as many answers, of two tokens a round."""
    named = "".join(f',{name}="{value}"' for name, value in labels.items())
    places = accepted or (drafts // 2, drafts // 4)
    values: dict[str, Any] = {"spec_decode_num_drafts_total": drafts, "request_success_total": drafts // 10}
    values |= {"spec_decode_num_draft_tokens_total": drafts * len(places), "num_requests_running": 1}
    lines = [f'vllm:{name}{{model_name="m"{named}}} {float(value)}' for name, value in values.items()]
    per_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{per_place}{{model_name="m",position="{n}"{named}}} {count}.0' for n, count in enumerate(places)]
    return "\n".join(lines + ([] if started is None else [f"process_start_time_seconds {started}"])) + "\n"


def watched(*pages: str) -> tuple[Tally, list[str]]:
    """Watch pages at times 100, 200, ..., through a state file each time; return the notes of the last one too."""
    tally, notes = Tally("http://here"), list[str]()
    for number, page in enumerate(pages, start=1):
        notes = tally.add(read_page(page, 100.0 * number))
        tally = Tally.from_json(json.loads(json.dumps(tally.to_json())), "http://here")
    return tally, notes


def test_vllm_counts_until_a_page():
    tally, notes = watched(VLLM)
    assert not notes and tally.answers == 9 + 4  # four run
    tally, notes = watched(VLLM, changed(VLLM, AFTER))
    assert tally.total == EngineCounts(721, 2163, 810, 25, generated=1532, by_place=(409, 237, 164))
    assert not notes and tally.answers == 25


def test_llamacpp_counts_what_its_answers_do(tmp_path: Path):
    tally, notes = watched(FRESH, LLAMACPP)
    file = tmp_path / "answers.jsonl"
    lines = [{"timings": {"predicted_n": n, "draft_n": drafted, "draft_n_accepted": accepted}, "choices": []}
             for n, drafted, accepted in ANSWERS]  # fmt: skip
    lines += [{"request": {"messages": []}, "response": {"timings": {"predicted_n": 1}}}]  # nothing drafted
    file.write_text("\n".join(map(json.dumps, lines)))
    pages, answers = read_saved(file)
    assert not pages and not notes and len(answers) == 17
    total = tally.total
    assert (total.drafts, total.by_place, tally.answers) == (246, (156, 117, 88), None)
    sums = [sum(getattr(answer, name) or 0 for answer in answers) for name in ("drafted", "accepted", "generated")]
    assert sums == [total.drafted, total.accepted, (total.generated or 0) + 1] == [720, 361, 629]


def test_sglang_accepted_tokens_are_all_but_those_of_the_target():
    total = read_page(SGLANG, 1.0).total
    assert (total.drafts, total.accepted, total.by_place, total.finished) == (29, (41 - 1 - 20) + (17 - 1 - 9), (), 2)
    # Before the first answer there is no such counter.
    assert read_page('sglang:num_running_reqs{tp_rank="0"} 0.0', 1.0) == Snapshot(1.0, "sglang")


def test_the_format_is_read_as_prometheus_defines_it():
    page = 'vllm:spec_decode_num_drafts{engine="0", model_name="a,b=\\"c\\"}"} 1.5e+06 1712345678901\n'
    page += 'vllm:spec_decode_num_drafts_total { engine="1",model_name="a" } 2 # {trace="x"} 1.0 2.0\n# EOF\n'
    page += 'vllm:num_requests_waiting{engine="1"} NaN\nother:spec_decode_num_drafts_total 7\n'
    snapshot = read_page(page, 1.0)
    assert list(snapshot.engines) == ['engine=0, model_name=a,b=\\"c\\"}', "engine=1, model_name=a"]
    assert snapshot.total == EngineCounts(drafts=1_500_002)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (VLLM.replace("} 288.0", "} NaN"), "NaN, expected counts"),
        (VLLM.replace("} 288.0", "} +Inf"), "Inf, expected counts"),
        (VLLM.replace("} 288.0", "} -1.0"), "-1.0, expected counts"),
        (VLLM.replace('position="2"', 'position="1.5"'), "1.5.*expected counts"),
        ("<html>502 Bad Gateway</html>", "found 0 pages"),
        ("process_start_time_seconds 1.7e+09\n", "found 0 pages"),
        (VLLM + VLLM, "found 2 pages"),
        (VLLM + LLAMACPP, "metrics of vllm and llamacpp"),
    ],
)
def test_what_is_no_page_of_one_server_is_one_line(page, said):
    with pytest.raises(InputError, match=said):
        read_page(page, 1.0)


def test_a_restarted_process_counts_from_zero_and_its_running_answers_stay_counted():
    tally, notes = watched(vllm(100, started=1.0), vllm(300, started=1.0), vllm(50, started=250.0))
    assert "restarted" in notes[0]
    assert (tally.total.drafts, tally.total.accepted) == (350, 225 + 37)
    assert tally.answers == (30 + 1) + (5 + 1)


def test_replicas_that_answer_in_turn_are_each_counted():
    pages = [vllm(100, started=1.0), vllm(9000, started=2.0), vllm(130, started=1.0), vllm(9050, started=2.0)]
    tally, notes = watched(*pages)
    assert tally.total.drafts == 130 + 9050 and not notes
    assert "another process" in watched(*pages[:2])[1][0]


def test_without_a_start_time_a_fall_is_not_counted_at_once_and_a_second_one_ends_all_counting():
    fallen = [vllm(1100), vllm(40), *(vllm(50 + n) for n in range(TRIAL - 1))]
    tally, notes = watched(*fallen[:2])
    assert "counts fell" in notes[0] and tally.total.drafts == watched(*fallen)[0].total.drafts == 1100
    assert "counts fell" in watched(LLAMACPP, FRESH)[1][0]
    tally, notes = watched(*fallen, vllm(90))
    assert (tally.total.drafts, tally.answers, notes) == (1190, 110 + 9 + 1, [])
    tally, _ = watched(*fallen[:4], vllm(1100), vllm(60), vllm(1200))
    assert not tally.drafting and tally.total == EngineCounts()
    assert "several servers" in watched(*fallen[:4], vllm(1100), vllm(60))[1][0]


def test_engines_appear_and_disappear():
    two = vllm(100, engine="0") + vllm(500, engine="1")
    assert watched(two, vllm(110, engine="0"), vllm(120, engine="0") + vllm(540, engine="1"))[0].total.drafts == 660
    assert watched(two, vllm(110, engine="0"))[1] == ["engine=1, model_name=m: gone"]
    assert watched(vllm(1, engine="0"), two)[1] == ["engine=1, model_name=m: a new engine"]


def test_a_missing_metric_is_said_and_nothing_is_counted_until_it_is_back():
    cut = "\n".join(line for line in vllm(200).splitlines() if "num_drafts" not in line)
    tally, notes = watched(vllm(100), cut)
    assert notes == ["model_name=m: no count of drafts; nothing is counted until it is back"]
    assert (tally.total.drafts, tally.total.accepted, tally.total.finished) == (100, 75, 10)
    assert watched(vllm(100), cut, vllm(250))[0].total.drafts == 250
    assert "counts no drafts" in watched(cut)[1][0]


def test_another_draft_length_begins_anew():
    pages = [vllm(200, (90, 50), started=1.0), vllm(10, (5, 2, 1), started=150.0), vllm(30, (15, 6, 3), started=150.0)]
    tally, notes = watched(*pages)
    assert (tally.total.drafts, tally.total.by_place) == (30, (15, 6, 3)) and not notes
    assert watched(*pages[:2])[1] == ["drafts of 3 tokens, 2 before: counts begin anew"]


def test_llamacpp_rounds_sums_above_a_million():
    def page(drafts: str, first: int) -> str:
        return changed(LLAMACPP, {"num_drafts_total 246": f"num_drafts_total {drafts}", '"0"} 156': f'"0"}} {first}'})

    # Ten drafts more or less are many of 60, but few of 4,000.
    pages = [page("1.23457e+06", 500_000), page("1.23463e+06", 500_031), page("1.23857e+06", 502_000)]
    for seen, (drafts, first) in {2: (1_234_570, 500_000), 3: (1_238_570, 502_000)}.items():
        total = watched(*pages[:seen])[0].total
        assert (total.drafts, total.by_place[0]) == (drafts, first)


def test_saved_pages_are_split(tmp_path: Path):
    file = tmp_path / "pages.txt"
    file.write_text(f"# time 1700000000.5\n{VLLM}# time 1700000060\n{changed(VLLM, AFTER)}")
    pages, answers = read_saved(file)
    assert [page.time for page in pages] == [1700000000.5, 1700000060.0] and not answers
    assert [page.total.drafts for page in pages] == [288, 721]
    by_order = list(read_pages(VLLM + changed(VLLM, AFTER)))  # as curl appends them
    assert [(page.time, page.total) for page in by_order] == [(None, page.total) for page in pages]
    file.write_text('{"timings": {"predicted_n": 3}}\n{"choices": []}\n')
    with pytest.raises(InputError, match="line 2 without"):
        read_saved(file)


def test_vllm_answers_count_by_place_unless_a_stop_string_ended_them(tmp_path: Path):
    counts = {"acceptance_histogram": [20, 12, 5, 15], "num_spec_steps": 52, "num_draft_tokens": 156}
    rows: list[dict[str, Any]] = [{"metrics": {"speculative_decoding": counts}}, {"metrics": None}]
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(json.dumps({"response": {"usage": {"completion_tokens": 120}, **row}}) for row in rows))
    counted, unknown = read_saved(file)[1]
    # The first token, one of every round and the accepted ones.
    assert counted == EngineCounts(52, 156, 67, generated=1 + 52 + 67, by_place=(32, 20, 15))
    assert unknown == EngineCounts(generated=120)


def test_a_state_of_another_server_or_a_damaged_one_is_refused():
    state = watched(VLLM)[0].to_json()
    damaged = [
        ({**state, "server": "http://there"}, "http://there"),
        ({**state, "processes": []}, "processes"),
        ([], ""),
    ]
    damaged += [({name: state[name] for name in state if name != "places"}, "no places")]
    for content, said in damaged:
        with pytest.raises(InputError, match=f"^state: .*{said}"):
            Tally.from_json(content, "http://here")
    with pytest.raises(InputError, match="found llamacpp, expected vllm"):
        Tally.from_json(state, "http://here").add(read_page(LLAMACPP, 1.0))

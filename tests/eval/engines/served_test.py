"""`eval served`: rows of answers with known times and rounds, the load, the schedule, and running servers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from servers import Request, Server

from draftsmith.data.console import draw_table
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.engines import served
from draftsmith.eval.engines.chain import Counted, EngineAnswer
from draftsmith.eval.engines.served import (
    PLAIN,
    Measured,
    Setting,
    advice,
    ask,
    best_lengths,
    call_seconds,
    contexts_of,
    load_table,
    ranges,
    summary,
)
from draftsmith.launch.cli import main
from draftsmith.modules.types import InputError

THREE = Setting(3)


def prompt(number: int, task: str = "") -> BenchPrompt:
    return BenchPrompt(id=f"p{number}", task=task, prompt_ids=[1, 2], number=number)


def answer(count: int, seconds: float, *counts: int) -> EngineAnswer:
    return EngineAnswer(tuple(range(count)), counts, seconds, first_s=0.1)


def measured(*answers: EngineAnswer, load: int = 1) -> Measured:
    groups = [number // load for number in range(len(answers))]
    return Measured(list(answers), groups, [Counted.of([one]) for one in answers])


def test_tau_counts_target_calls_and_speed_leaves_out_the_prompt():
    prompts = [prompt(0, "code"), prompt(1, "chat")]
    plain = measured(answer(9, 4.0), answer(5, 2.0))  # 12 tokens behind the prompts' own in 6 s
    # Three rounds of 2, 1 and 2 accepted give 8 tokens; two of 1 and 0, with one plain step, give 4.
    cells = {(PLAIN, 1): plain, (THREE, 1): measured(answer(9, 2.0, 3, 3, 2, 0), answer(5, 2.0, 2, 1, 0, 0))}
    row = summary(THREE, 1, cells, prompts, 0.0)
    assert row["tokens_per_s"] == pytest.approx(12 / 4) and row["speedup"] == pytest.approx(1.5)
    assert row["speedup_ci95"] == pytest.approx([1.0, 2.0]) and row["first_token_s"] == pytest.approx(0.1)
    # A call more reads the prompt and emits the first token.
    assert row["tau"] == pytest.approx(14 / 8) and row["num_differing"] == 0
    assert row["accepted_by_place"] == pytest.approx([4 / 5, 2 / 5, 0])
    base = summary(PLAIN, 1, cells, prompts, 0.0)
    assert (base["speedup"], base["tau"], base["accepted_by_place"], base["speedup_ci95"]) == (1.0, 1.0, [], None)


def test_under_load_speed_is_that_of_all_requests_and_counts_are_of_the_whole_group():
    cells = {(PLAIN, 4): measured(*[answer(11, 10.0)] * 4, load=4)}
    cells[THREE, 4] = measured(*[answer(11, 5.0)] * 4, load=4)
    cells[THREE, 4].counted = [Counted(5, 55, (25, 20, 5, 0))]  # with 11 tokens of an answer that does not count
    row = summary(THREE, 4, cells, [prompt(number) for number in range(4)], 1.0)
    assert row["tokens_per_s"] == pytest.approx(4 * 40 / 20) and row["speedup"] == pytest.approx(2.0)
    assert row["tau"] == pytest.approx(55 / 30) and row["num_differing"] is None
    assert row["speedup_ci95"] is None  # one group tells nothing of others


def test_prompts_that_began_together_are_drawn_together():
    """Of two groups of two the first is twice as fast, the second as fast: resamples are 2x, 1x or between."""
    cells = {(PLAIN, 2): measured(*[answer(11, 10.0)] * 4, load=2)}
    cells[THREE, 2] = measured(*[answer(11, 5.0)] * 2, *[answer(11, 10.0)] * 2, load=2)
    row = summary(THREE, 2, cells, [prompt(number) for number in range(4)], 0.0)
    assert row["speedup"] == pytest.approx(4 / 3) and row["speedup_ci95"] == pytest.approx([1.0, 2.0])


def test_a_last_draft_that_ends_the_answer_is_a_call():
    # The drafted end token is accepted, and the target's own token behind it is not emitted.
    cells = {(PLAIN, 1): measured(answer(6, 1.0)), (Setting(2), 1): measured(answer(6, 1.0, 2, 2, 1))}
    assert summary(Setting(2), 1, cells, [prompt(0)], 1.0)["tau"] == pytest.approx(6 / 3)


def test_answers_of_one_token_have_no_speed():
    with pytest.raises(InputError, match="answers of one token each"):
        summary(PLAIN, 1, {(PLAIN, 1): measured(answer(1, 0.0))}, [prompt(0)], 0.0)


class SlowClient:
    """Answers of one second per prompt number, in a hundredth; counts how many run at once."""

    def __init__(self) -> None:
        self.lock, self.running, self.seen = threading.Lock(), 0, list[int]()

    def complete(self, ids: list[int], seed: int, stop: threading.Event) -> EngineAnswer:
        with self.lock:
            self.running += 1
            self.seen.append(self.running)
        stop_at = time.monotonic() + ids[0] / 100
        while time.monotonic() < stop_at and not stop.is_set():
            time.sleep(0.001)
        with self.lock:
            self.running -= 1
        return answer(ids[0], 1.0)


def test_the_load_stays_until_the_last_measured_answer():
    prompts = [BenchPrompt(id=str(n), prompt_ids=[n]) for n in (2, 3, 30)]
    client: Any = SlowClient()
    answers, others = ask(client, prompts, 3)
    assert [len(one.tokens) for one in answers] == [2, 3, 30] and len(others) > 2
    assert max(client.seen) == 3 and client.seen[3:].count(3) > 2 and client.running == 0
    alone: Any = SlowClient()
    assert len(ask(alone, prompts, 1)[0]) == 3 and set(alone.seen) == {1}


def test_an_interrupt_does_not_wait_for_a_stalled_server(request):
    # A job in the background of a shell ignores it.
    request.addfinalizer(
        partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    begun, stalled = threading.Event(), threading.Event()

    class Stalled(SlowClient):
        def complete(self, ids: list[int], seed: int, stop: threading.Event) -> EngineAnswer:
            begun.set()
            stalled.wait(20)
            return answer(1, 1.0)

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    client: Any = Stalled()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask(client, [BenchPrompt(id="1", prompt_ids=[1])], 2)
    assert time.monotonic() - began < 5
    stalled.set()


def test_a_failed_request_ends_the_measurement():
    class Failing(SlowClient):
        def complete(self, ids: list[int], seed: int, stop: threading.Event) -> EngineAnswer:
            if ids[0] == 3:
                raise InputError("server", "nothing", "an answer", "Read its log.")
            return super().complete(ids, seed, stop)

    client: Any = Failing()
    with pytest.raises(InputError, match="server: found nothing"):
        ask(client, [BenchPrompt(id=str(n), prompt_ids=[n]) for n in (90, 3, 90)], 3)


def test_the_best_length_between_measured_loads_is_interpolated():
    """A token takes 10 + B, 8 + 2 B and 6 + 4 B: K = 2 is the fastest up to 1, K = 1 up to 2, then none."""
    curves = {0: (10, 1), 1: (8, 2), 2: (6, 3.9)}
    seconds = {k: {load: plain + load * more for load in (1, 4, 16)} for k, (plain, more) in curves.items()}
    lengths = best_lengths(seconds)
    assert ranges(lengths) == [(1, 1, 2), (2, 16, 0)]
    del seconds[0]
    assert ranges(best_lengths(seconds)) == [(1, 1, 2), (2, 16, 1)]
    assert best_lengths({1: {1: 1.0}, 3: {1: 1.0}}) == [1]
    assert ranges([3, 3, 1, 3]) == [(1, 2, 3), (3, 3, 1), (4, 4, 3)]


def test_advice_claims_what_its_interval_holds():
    row = {"requests": 4, "num_drafted": 3, "p_min": 0.0, "speedup": 1.2, "speedup_ci95": [1.1, 1.3]}
    assert advice([row], "Requests at once: 4. ") == "Requests at once: 4. Serve with K=3: 1.20x the plain server."
    assert "more prompts must confirm" in advice([{**row, "speedup_ci95": [0.9, 1.5]}], "")
    assert advice([{**row, "speedup": 0.8, "speedup_ci95": None}], "").startswith(
        "Do not speculate: the best setting, K=3, is 0.80x"
    )


def test_the_table_fits_a_terminal(capsys):
    cells = {(PLAIN, 16): measured(*[answer(9, 4.0)] * 16), (Setting(5, 0.75), 16): measured(*[answer(9, 2.0)] * 16)}
    prompts = [prompt(n) for n in range(16)]
    rows = [
        {"context": name, **summary(setting, 16, cells, prompts, 0.0)}
        for name in ("below 16k", "from 16k")
        for setting, _ in cells
    ]
    draw_table(Console(width=80), load_table(rows, "title"))
    heading = capsys.readouterr().out.splitlines()[4]
    assert heading.split()[:4] == ["at", "once", "context", "drafts"] and heading.rstrip().endswith("= plain")


# -- running servers


class Streaming(Server):
    """Streams three tokens to each request, as llama.cpp and vLLM do; two of them by a draft of two."""

    drafts = 0

    def __init__(self) -> None:
        super().__init__(self.reply)

    def reply(self, request: Request) -> Any:
        if request.path == "/v1/models":
            return {"data": [{"id": "m", "max_model_len": 64}]}
        if request.path == "/metrics":
            return (
                f"vllm:spec_decode_num_drafts_total{{}} {self.drafts}\n"
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {self.drafts}\n'
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} 0\n'
                f"vllm:request_success_total{{}} {self.drafts}\n"
            )
        assert request.body["stream"]
        self.drafts += 1
        if request.path == "/completion":
            events = [{"tokens": [5], "timings": {"predicted_n": 1}}]
            counts = {"draft_n": 2, "draft_n_accepted": 1, "predicted_n": 3}
            events.append({"tokens": [6, 7], "timings": counts})
        else:
            events = [{"choices": [{"token_ids": ids}]} for ids in ([5], [6, 7])]
            events.append({"choices": [], "usage": {"completion_tokens": 3}})
        return self.stream([*(json.dumps(event) for event in events), "[DONE]"])

    def stream(self, events: list[str]) -> Iterator[bytes]:
        for event in events:
            yield f"data: {event}\n\n".encode()
            time.sleep(0.002)


@pytest.fixture
def url():
    with Streaming() as server:
        yield server.url


@pytest.mark.parametrize(
    ("engine", "label", "tau"), [("llamacpp", "as served", 1.5), ("vllm", "K=2", 1.5), ("sglang", "as served", None)]
)
def test_a_running_server_is_measured_by_load(url, engine, label, tau, tmp_path, capsys):
    words = ["eval", "served", "--engine", engine, "--server", url, "--target", "embedded:target", "--limit", "3"]
    words += ["--data", "embedded:prompts", "--concurrency", "2,1", "--max-new-tokens", "3", f"--output={tmp_path}"]
    assert main(words) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["meta"]["kind"] == "served" and [row["requests"] for row in results["rows"]] == [1, 2]
    assert all(row["tokens_per_s"] > 0 and row["first_token_s"] > 0 for row in results["rows"])
    assert results["rows"][0]["tau"] == tau  # the fake counts drafts of requests that are cut off, too
    assert label in capsys.readouterr().out and not (tmp_path / "vllm-schedule.json").exists()


class Timed:
    """A server of known speed: a token takes (4 + B (1 + K)) / gain, with 40 in place of 4 for long prompts."""

    def __init__(self, k: int):
        self.k, self.gain = k, {0: 1, 1: 1.8, 3: 2.5}[k]

    def ask(self, prompts: list[BenchPrompt], load: int) -> tuple[list[EngineAnswer], list[EngineAnswer]]:
        assert len({len(each.prompt_ids) < 1024 for each in prompts}) == 1
        bases = [40 if len(each.prompt_ids) >= 1024 else 4 for each in prompts]
        return [answer(11, 10 * (base + load * (1 + self.k)) / self.gain) for base in bases], []

    def counts(self) -> None:
        pass

    def counts_since(self, before: Any, answers: Any, whole: int) -> Any:
        return (10, 8, *[0] * (self.k - 1)) if self.k else ()


def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lengths: list[int], ks: list[int], **options: Any) -> Any:
    """Measure prompts of these lengths on `Timed` servers. Return what results.json holds."""
    prompts = [BenchPrompt(id=str(number), prompt_ids=[1] * n, number=number) for number, n in enumerate(lengths)]
    timed = iter([{Setting(k): Timed(k)} for k in ks])
    monkeypatch.setattr(served, "read_questions", lambda *_: [prompts])
    monkeypatch.setattr(served, "ask", lambda client, group, load: client.ask(group, load))
    monkeypatch.setattr(served, "vllm_servers", lambda config, longest: timed)
    config = served.ServedConfig(
        engine="vllm", target="embedded:target", head=tmp_path, data="embedded:prompts", concurrency="1,4",
        output=tmp_path / "out", **options,
    )  # fmt: skip
    assert served.run(config) == 0
    return json.loads((tmp_path / "out/results.json").read_text())


def test_a_sweep_of_vllm_writes_the_schedules(tmp_path, monkeypatch, capsys):
    content = sweep(monkeypatch, tmp_path, [9] * 8, [0, 1])
    # At 1 request (4 + 2) / 1.8 < 5; at 4 (4 + 8) / 1.8 < 8; so K = 1 throughout.
    assert content["schedules"]["vllm-schedule.json"] == json.loads((tmp_path / "out/vllm-schedule.json").read_text())
    assert json.loads((tmp_path / "out/sglang-schedule.json").read_text()) == {"1": {"candidate_steps": [1]}}
    shown = " ".join(capsys.readouterr().out.split())
    assert "Requests at once: 1. Serve with K=1: 1.50x" in shown and "Requests at once: 4. Serve" in shown
    assert len(content["schedules"]) == 2 and "ontext" not in shown


def test_each_context_is_measured_alone_and_has_its_schedule(tmp_path, monkeypatch, capsys):
    """Short prompts at 4 at once: 12 / 1.8 with K = 1, 20 / 2.5 with 3; long ones 48 / 1.8 and 56 / 2.5."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/vllm-schedule-from-4k.json").write_text("{}")  # of an earlier run with other contexts
    content = sweep(monkeypatch, tmp_path, [9, 1024, 9, 9000] * 4, [0, 1, 3], contexts="1k")
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*-schedule*.json")}
    assert written == content["schedules"] and len(written) == 6
    key = "num_speculative_tokens_per_batch_size"
    assert written["vllm-schedule-below-1k.json"][key] == [[1, 1, 3], [2, 4, 1]]
    assert written["vllm-schedule-from-1k.json"][key] == [[1, 4, 3]]
    # Of all prompts, half are short: (8 + 22.4) / 2 with K = 3 beside (6.67 + 26.67) / 2.
    assert written["vllm-schedule.json"][key] == [[1, 4, 3]]
    rows = {(row["context"], row["requests"], row["num_drafted"]): row for row in content["rows"]}
    assert [row["prompt_tokens"] for at, row in rows.items() if at[1:] == (1, 0)] == [9, 5012, 2510.5]
    assert rows["from 1k", 4, 3]["tokens_per_s"] == pytest.approx(4 / 22.4, rel=1e-4)
    assert rows["all", 4, 3]["tokens_per_s"] == pytest.approx(4 / 15.2, rel=1e-4)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Context: below 1k. Requests at once: 4. Serve with K=1: 1.20x the plain server." in shown
    lost = "Lost with K=3 for all contexts, requests at once: 4. below 1k: K=1 is 1.20x as fast (1.20"
    assert lost in shown and "; from 1k: nothing." in shown


def test_contexts_have_as_many_prompts_as_requests_at_once():
    prompts = [BenchPrompt(id=str(n), prompt_ids=[1] * n) for n in (5, 6, 7, 8)]
    found = {each.name: [len(one.prompt_ids) for one in each.prompts] for each in contexts_of(prompts, [6, 8], 1)}
    assert found == {"below 6": [5], "from 6": [6, 7], "from 8": [8]}
    # Prompts of one class only are not divided, and a lowest class may be empty.
    assert [each.name for each in contexts_of(prompts, [5], 4)] == ["all"]
    for edges, most, expected in (([6], 2, "1 prompts below 6"), ([6, 99], 1, "0 prompts from 99")):
        with pytest.raises(InputError, match=f"{most} requests at once of {expected} tokens"):
            contexts_of(prompts, edges, most)


def test_a_round_takes_as_long_with_other_acceptance():
    """Rounds of 1 + B / 4 seconds for K = 3, whatever is accepted, and of B / 4 without drafts."""
    accepted = [0.9, 0.5, 0.1]
    rows = [
        {"requests": load, "num_drafted": k, "p_min": p_min, "context": context, "accepted_by_place": places,
         "tokens_per_s": (1 + sum(places)) * load / ((1 if k else 0) + load / 4) * factor}
        for load in (2, 6)
        for k, p_min, context, places, factor in (
            (0, 0.0, "all", [], 1), (3, 0.0, "all", accepted, 1), (3, 0.5, "all", accepted, 9),
            (3, 0.0, "from 1k", accepted, 9), (5, 0.0, "all", [], 9), (None, 0.0, "all", accepted, 9),
        )
    ]  # fmt: skip
    assert call_seconds(rows, 3) == pytest.approx({0: 0.75, 3: 1.75})
    assert call_seconds(rows, 6.0) == pytest.approx({0: 1.5, 3: 2.5})
    assert call_seconds(rows, 1) == call_seconds(rows, 7) == {}

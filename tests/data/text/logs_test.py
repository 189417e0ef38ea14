"""Request logs as their makers write them, read as chats: against messages by hand, and the text by jinja's rendering.

CHAT and RESPONSE are what `model_dump_json` of openai's ChatCompletion and Response wrote (openai 3.57).
"""

from __future__ import annotations

import json

import pytest
from chats import (
    ASSISTANT,
    CHATML,
    SYSTEM,
    TARGET,
    USER,
    chat,
    chat_model,
    learned,
    make_prompts,
    make_responses,
    rendered,
    rows_of,
    text_of,
)

from draftsmith.data.prompts import PromptsConfig, run
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.text import conversations
from draftsmith.data.text.conversations import read_chat, row_label
from draftsmith.data.text.logs import is_secret
from draftsmith.data.text.template import RowError
from draftsmith.eval.bench.replay import read_recorded
from draftsmith.eval.settings import BenchConfig
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.hub import resolve_model
from draftsmith.modules.types import InputError

FLAT = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"api_key": {}}}}
TOOL = {"type": "function", "function": {key: FLAT[key] for key in ("name", "parameters")}}
CALL = {"id": "call_1", "function": {"arguments": '{"city": "Oslo"}', "name": "weather"}, "type": "function"}
READ_CALL = {**CALL, "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CHAT = {"id":"chatcmpl-1","choices":[{"finish_reason":"tool_calls","index":0,"logprobs":None,"message":{"content":None,"refusal":None,"role":"assistant","annotations":None,"audio":None,"function_call":None,"tool_calls":[CALL]}}],"created":1,"model":"m","object":"chat.completion","metadata":None,"service_tier":None,"system_fingerprint":None,"usage":{"completion_tokens":2,"prompt_tokens":1,"total_tokens":3}}  # fmt: skip # noqa: E501
RESPONSE = {"id":"resp_1","created_at":1.0,"error":None,"incomplete_details":None,"instructions":None,"metadata":None,"model":"m","object":"response","output":[{"id":"rs_1","summary":[],"type":"reasoning","content":[{"text":"I look.","type":"reasoning_text"}],"encrypted_content":None,"status":None},{"id":"msg_1","content":[{"annotations":[],"text":"A moment.","type":"output_text","logprobs":None}],"role":"assistant","status":"completed","type":"message","phase":None},{"arguments":'{"city": "Oslo"}',"call_id":"call_1","name":"weather","type":"function_call","id":"fc_1","namespace":None,"status":"completed"}],"parallel_tool_calls":True,"temperature":0.7,"tool_choice":"auto","tools":[FLAT],"top_p":1.0,"conversation":None,"previous_response_id":None,"prompt":None,"reasoning":None,"status":"completed"}  # fmt: skip # noqa: E501
ASKED = chat((SYSTEM, "Be brief."), (USER, "Hi"), (ASSISTANT, "Ho"), (USER, "Warm?"))
REQUEST = {"model": "m", "messages": ASKED, "tools": [TOOL], "temperature": 0.7, "metadata": {"route": "shop"}}
CALLED = {"role": ASSISTANT, "content": "", "tool_calls": [READ_CALL]}
THOUGHT = {**CALLED, "content": "A moment.", "reasoning_content": "I look."}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Ho"}], "status": "completed"},
    {"role": "user", "content": "Warm?"},
]
BY_ITEMS = {"model": "m", "instructions": "Be brief.", "input": ITEMS, "tools": [FLAT], "temperature": 0.7}


def answered(content: str = "Yes.", finish_reason: str = "stop", **more) -> dict:
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}],
        **more,
    }


MAKERS = {
    "a gateway": ({"request": REQUEST, "response": CHAT}, CALLED),
    "JSON text": ({"request": json.dumps(REQUEST), "response": json.dumps(CHAT)}, CALLED),
    "with headers": ({"request": {"headers": {}, "body": REQUEST}, "response": {"status": 200, "body": CHAT}}, CALLED),
    "responses": ({"request": BY_ITEMS, "response": RESPONSE}, THOUGHT),
    "helicone": ({"request_id": "r", "request_body": REQUEST, "response_body": CHAT, "response_status": 200}, CALLED),
    "litellm": (
        {"id": "c", "call_type": "acompletion", "status": "success", "messages": ASKED, "response": CHAT,
         "error_str": None, "model_parameters": {"temperature": 0.7, "tools": [TOOL]}, "metadata": {"route": "shop"}},
        CALLED,
    ),
    "litellm's table": (
        {"request_id": "c", "messages": {}, "proxy_server_request": json.dumps(REQUEST), "response": CHAT}, CALLED,
    ),
    "envoy": ({"attributes": {"input.value": json.dumps(REQUEST), "output.value": json.dumps(CHAT)}}, CALLED),
    "langfuse": (
        {"type": "GENERATION", "level": "DEFAULT", "input": {"messages": ASKED, "tools": [TOOL]},
         "output": {"role": "assistant", "content": None, "tool_calls": [CALL]}},
        CALLED,
    ),
    "a batch's input": ({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": REQUEST}, None),
    "messages": (
        {"request": {"system": "Be brief.", "messages": ASKED[1:],
                     "tools": [{"name": "weather", "input_schema": FLAT["parameters"]}]},
         "response": {"type": "message", "role": "assistant", "stop_reason": "tool_use",
                      "content": [{"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}}]}},
        CALLED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("maker", MAKERS)
def test_a_logged_request_is_a_chat_that_ends_with_its_answer(maker):
    row, answer = MAKERS[maker]
    found = read_chat(row, {})
    assert found.messages == [*ASKED, *([answer] if answer else [])] and found.inputs == {"tools": [TOOL]}
    # Earlier answers belong to earlier requests; nothing that was said is left out.
    assert found.not_learned == (2,) and found.logged and not found.cut and not found.ignored


def test_results_of_tools_among_items_keep_their_place():
    items = [*ITEMS, *RESPONSE["output"], {"type": "function_call_output", "call_id": "call_1", "output": "5 C"}]
    row = {"request": {**BY_ITEMS, "input": items}, "response": answered()}
    result = {"role": "tool", "content": "5 C", "tool_call_id": "call_1"}
    assert read_chat(row, {}).messages == [*ASKED, THOUGHT, result, *chat((ASSISTANT, "Yes."))]
    assert read_chat(
        {"request": {"input": "Hi"}, "response": {**RESPONSE, "output": [RESPONSE["output"][1]]}}, {}
    ).messages == chat((USER, "Hi"), (ASSISTANT, "A moment."))


REFUSED = {
    "prompt": {"request": {"prompt": "<|user|>Hi", "max_tokens": 5}, "response": {"choices": [{"text": "Ho"}]}},
    "previous_response_id": {"request": {"input": "And now?", "previous_response_id": "resp_0"}, "response": RESPONSE},
    "item of type mcp_call": {"request": {"input": [*ITEMS, {"type": "mcp_call", "name": "x"}]}},
    "ends with an answer": {"request": {"messages": ASKED[:3]}, "response": answered()},
    "redacted": {"request": {"messages": chat((USER, "redacted-by-litellm"))}, "response": answered()},
    "not whole": {"request": REQUEST, "response": 'data: {"choices": [{"delta": {"content": "Ho"}}]}'},
    "another kind": {"request": {"input": "Hi"}, "response": {"object": "list", "data": [{"embedding": [0.5]}]}},
    "none of messages": {"custom_id": "a", "response": {"status_code": 200, "body": CHAT}, "error": None},
    "2 messages": {"request": REQUEST, "response": {**RESPONSE, "output": [RESPONSE["output"][1]] * 2}},
}


@pytest.mark.parametrize("found", REFUSED)
def test_a_request_whose_chat_is_not_whole_is_refused(found):
    with pytest.raises(RowError, match=found):
        read_chat(REFUSED[found], {})


FAILURES = [
    {"request": REQUEST, "response": {"status_code": 429, "body": {"error": {"message": "slow down"}}}},
    {"request": REQUEST, "response": {"error": {"message": "overloaded", "code": 500}}},
    {"request_body": REQUEST, "response_body": {}, "response_status": 500},
    {"call_type": "acompletion", "status": "failure", "messages": ASKED, "response": {}, "error_str": "Timeout"},
    {"request": BY_ITEMS, "response": {**RESPONSE, "status": "cancelled", "output": []}},
    {"request": REQUEST, "response": answered(None, "content_filter")},
    {"request": REQUEST, "response": {"choices": []}},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(chat_model(tmp_path_factory.mktemp("targets") / "chatml", CHATML))


@pytest.fixture
def make(target, tmp_path):
    """`data prompts` of these rows: (rows, counts, all that was written)."""
    runs = iter(range(99))

    def make(rows: list[dict], **settings):
        source = tmp_path / f"{next(runs)}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        output = run(PromptsConfig(str(source), target, source.with_suffix(""), **settings))
        written = b"".join(path.read_bytes() for path in output.iterdir() if path.is_file())
        return rows_of(output), Manifest.read(output).counts, written.decode("latin-1")

    return make


def test_each_request_is_asked_once_and_its_own_answer_is_learned(make):
    """A conversation of two turns, logged at each of them."""
    said = chat((USER, "Hi"), (ASSISTANT, "Ho"), (USER, "Go"), (ASSISTANT, "No"))
    logs = [
        {"request": {"messages": said[: 2 * n - 1]}, "response": answered(said[2 * n - 1]["content"], id=f"r{n}")}
        for n in (1, 2)
    ]
    for turns in ("all", "last", "each"):
        rows, counts, _ = make(logs, turns=turns)
        assert [text_of(row, "prompt_ids") for row in rows] == [
            rendered(CHATML, part, add_generation_prompt=True) for part in (said[:1], said[:3])
        ]
        assert [row["id"] for row in rows] == ["r1", "r2"] and not counts["later_turns"]
        rows, _, _ = make(logs, turns=turns, supervised=True)
        assert [learned(row) for row in rows] == ["Ho<|im_end|>", "No<|im_end|>"]
    with pytest.raises(InputError, match="turns: found first with a logged request"):
        make(logs, turns="first")
    # Users may say two things, of which neither is a turn by itself.
    twice = {"request": {"messages": [*said[:1], *said[2:3]]}}
    (row,), _, _ = make([twice])
    assert text_of(row, "prompt_ids") == rendered(CHATML, twice["request"]["messages"], add_generation_prompt=True)


def test_requests_that_failed_are_dropped_and_counted(make):
    good = {"request": REQUEST, "response": answered()}
    for supervised in (False, True):
        rows, counts, _ = make([*FAILURES, good], supervised=supervised)
        assert len(rows) == 1 and counts["no_answer_dropped"] == len(FAILURES)
    # A request that nobody answered yet is a prompt.
    assert len(make([good, {"request": REQUEST}])[0]) == 2
    assert make([good, {"request": REQUEST}], supervised=True)[1]["no_answer_dropped"] == 1


def test_a_cut_answer_has_no_end_token(make):
    cut = [
        {"request": REQUEST, "response": answered("Yes", "length")},
        {"request": BY_ITEMS, "response": {**RESPONSE, "status": "incomplete", "output": RESPONSE["output"][1:2]}},
        # vLLM and SGLang: a stop string of the request.
        {"request": REQUEST, "response": {"choices": [{**answered()["choices"][0], "stop_reason": "END"}]}},
        {"request": REQUEST, "response": {"choices": [{**answered()["choices"][0], "matched_stop": "END"}]}},
    ]
    inside = {"request": BY_ITEMS, "response": {**RESPONSE, "id": "resp_2", "status": "incomplete"}}
    rows, counts, _ = make([*cut, inside], supervised=True)
    assert [learned(row) for row in rows] == ["Yes", "A moment.", "Yes.", "Yes."] and counts["cut_off_dropped"] == 1
    assert all(row["loss_mask"][-1] for row in rows)


def test_what_a_request_says_and_is_not_read_is_counted(make):
    request = {**REQUEST, "tool_choice": "required", "presence_penalty": 0, "logit_bias": {"5": 1}, "stream": True}
    request["tools"] = [TOOL, {"type": "web_search"}]
    choices = [*answered()["choices"], *answered("No.")["choices"]]
    _, counts, _ = make([{"request": request, "response": {"choices": choices}}])
    ignored = {name for name, count in counts.items() if name.endswith("_ignored") and count}
    assert ignored == {"tool_choice_ignored", "logit_bias_ignored", "tools_ignored", "choices_ignored"}


KEY = "sk-proj-abcdefgh12345678"
SECRETS = {
    "request": {
        "headers": {"Authorization": f"Bearer {KEY}", "x-route": "shop", "Cookie": "id=1", "X-Api-Key": "0123456789"},
        "body": {**REQUEST, "api_key": KEY, "user": KEY},
    },
    "response": {"headers": {"set-cookie": "id=1", "proxy-authorization": "Basic dXNlcjpwYXNz"}, "body": answered()},
    "metadata": {"note": f"with {KEY}", "beta": True, "tier": 2},
}  # fmt: skip


def test_no_secret_is_written_and_each_is_counted(make):
    keep = "note,beta,tier,temperature,request.headers.x-route,route,user"
    plain = {"request": {**REQUEST, "user": "u"}, "response": answered(), "note": "fine"}
    (first, second), counts, written = make([SECRETS, plain], keep=keep)
    assert json.loads(first["labels"]) == {
        "note": "", "beta": "true", "tier": "2", "temperature": "0.7", "request.headers.x-route": "shop",
        "route": "shop", "user": "",
    }  # fmt: skip
    assert {name: text for name, text in json.loads(second["labels"]).items() if text} == {
        "note": "fine", "temperature": "0.7", "route": "shop", "user": "u",
    }  # fmt: skip
    # Authorization, Cookie, X-Api-Key, api_key, user, set-cookie, proxy-authorization, note. A tool's api_key stays.
    assert counts["secrets_removed"] == 8 and "api_key" in first["template_inputs"]
    assert not any(secret in written for secret in (KEY, "0123456789", "id=1", "dXNlcjpwYXNz"))
    for options, found in (
        ({"keep": "route,request.headers.authorization"}, "authorization: found rows without it"),
        ({"keep": "note"}, "note: found rows without it"),
        ({"where": ("api_key=0123456789",)}, "api_key: found rows without it"),
        ({"columns": "task=api_key"}, "columns: found task=api_key"),
    ):
        with pytest.raises(InputError, match=found):
            make([SECRETS], **options)
    with pytest.raises(InputError, match="a dict in column headers") as error:
        make([{"request": REQUEST, "headers": {"authorization": KEY}}], columns="task=headers")
    assert KEY not in str(error.value)


@pytest.mark.parametrize(("name", "secret"), [
    ("Authorization", True), ("proxy-authorization", True), ("openai_api_key", True), ("m.user_api_key_hash", True),
    ("x-amz-security-token", True), ("token", True), ("max_tokens", False), ("time_to_first_token", False),
    ("user_api_key_alias", False), ("task", False), ("author", False),
])  # fmt: skip
def test_a_name_of_a_secret_is_told_from_others(name, secret):
    assert is_secret(name) == secret


def test_rows_are_kept_by_their_columns(make):
    logs = [
        {"request": {**REQUEST, "metadata": {"route": route}}, "response": answered(), "lang": lang}
        for route, lang in (("shop", "de"), ("help", "de"), ("shop", "da"), ("search", "fr"))
    ]
    # The command line splits lists at commas.
    assert (
        make(logs, where=("route=shop", "search", "lang=de", "lang=fr"))[0]
        == make(logs, where=("route=shop,search,lang=de,fr",))[0]
    )
    rows, _, _ = make(logs, where=("route=shop,search", "lang=de,fr"), keep="route,lang")
    assert [json.loads(row["labels"]) for row in rows] == [
        {"route": "shop", "lang": "de"},
        {"route": "search", "lang": "fr"},
    ]
    with pytest.raises(InputError, match="source: found no rows with route none, expected at least one row"):
        make(logs, where=("route=none",))
    for options in ({"where": ("rout=shop",)}, {"keep": "rout"}):
        with pytest.raises(InputError, match="rout: found rows without it, expected a column rout"):
            make(logs, **options)
    with pytest.raises(InputError, match="where: found route, expected NAME=VALUE"):
        make(logs, where=("route",))


def test_a_column_is_found_wherever_a_log_has_it():
    row = {**SECRETS, "model": "served"}
    found = {
        name: row_label(row, {}, name) for name in ("model", "route", "request.body.model", "tier", "finish", "id")
    }
    assert found == {"model": "served", "route": "shop", "request.body.model": "m", "tier": "2", "finish": "", "id": ""}


def test_a_language_is_that_of_the_answer_where_a_row_has_none(make, monkeypatch):
    seen = []
    monkeypatch.setattr(conversations, "language_of", lambda text: seen.append(text) or text[:2].lower())
    logs = [
        {"request": REQUEST, "response": answered("Ja.")},
        {"request": REQUEST, "response": CHAT},
        {"request": {**REQUEST, "metadata": {"language": "da"}}, "response": answered("Nej.")},
        {"prompt": "Hvad?", "language": "da"},
    ]
    rows, _, _ = make(logs, keep="language")
    assert [json.loads(row["labels"])["language"] for row in rows] == ["ja", "wa", "da", "da"]
    assert {*seen} == {"Ja.", "Warm?"}
    rows, _, _ = make(logs, where=("language=ja",))
    assert len(rows) == 1 and rows[0]["labels"] == "{}"


def test_labels_reach_answers_and_divide_a_replay(tmp_path):
    logs = [
        {"request": {**REQUEST, "metadata": {"route": route}}, "response": answered()} for route in ("shop", "help")
    ]
    (source := tmp_path / "logs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logs))
    asked = make_prompts(source, tmp_path / "asked", keep="route", invalid="drop")
    answers = make_responses(asked, tmp_path / "answers", max_new_tokens=4)
    supervised = make_prompts(source, tmp_path / "supervised", keep="route", supervised=True)
    for replayed in (source, answers, supervised):
        config = BenchConfig(target=TARGET, replay=replayed, by="route", output=tmp_path / "out")
        texts, _ = read_recorded(config, Checkpoint(resolve_model(TARGET)))
        assert [answer.labels["route"] for text in texts for answer in text.answers] == ["shop", "help"]
    with pytest.raises(InputError, match=r"by: found rout, .*data prompts --keep keeps"):
        read_recorded(
            BenchConfig(target=TARGET, replay=answers, by="rout", output=tmp_path / "out"),
            Checkpoint(resolve_model(TARGET)),
        )

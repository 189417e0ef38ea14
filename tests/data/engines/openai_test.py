"""The `openai` engine against an HTTP server that speaks as vLLM does."""

from __future__ import annotations

import asyncio
import email.utils
import gzip
import json
import threading
import time
from collections.abc import Callable

import pytest
from chats import CHATML, chat_model
from servers import Request, Server, completion, drip
from worlds import tiny_tokenizer

from draftsmith.data.engines import server as http
from draftsmith.data.engines.openai import ServerEngine
from draftsmith.data.engines.own import generate_all
from draftsmith.data.engines.server import MAX_WAIT_S
from draftsmith.data.stages import ServerConfig
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.template import RowError
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.modules.pretrained.checkpoint import Checkpoint, load_tokenizer
from draftsmith.modules.pretrained.identity import template_hash
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.types import InputError, SamplingParams


class VllmLike(Server):
    """Server of completions by a tiny model, which records every request in `asked`.

    misbehave: called first; what it returns is the reply.
    """

    def __init__(self, lm):
        super().__init__(self.reply)
        self.lm = lm
        self.asked: list[dict] = []
        self.lock, self.busy, self.most_busy = threading.Lock(), 0, 0
        self.misbehave: Callable[[dict], object] = lambda body: None

    @property
    def url(self) -> str:
        return super().url + "/v1"

    def reply(self, request: Request) -> object:
        body = request.body
        with self.lock:
            self.asked.append({"path": request.path, "key": request.token, **body})
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
        try:
            other = (404, {}, {"error": f"no model {body['model']}"}) if body["model"] != "tiny" else None
            return self.misbehave(body) or other or self.complete(body)
        finally:
            with self.lock:
                self.busy -= 1

    def complete(self, body: dict) -> dict:
        with self.lock:  # the lean model's caches are per session, but one core is enough
            params = SamplingParams(body["temperature"])
            (ids,) = generate_all(self.lm, [body["prompt"]], params, body["max_tokens"], 32)
        return completion(tiny_tokenizer(), body["prompt"], ids, self.lm.info.eos_ids)


@pytest.fixture
def vllm_like(chain):
    servers = []

    def start() -> VllmLike:
        servers.append(VllmLike(load_lm(str(chain.target))))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def ask(chain, remake):
    """Generate greedy responses through a server; returns (directory, rows)."""

    def make(url: str, **settings):
        asked = {"server_model": "tiny", "concurrency": 4, **settings}
        directory = remake("responses", engine="openai", temperature=0.0, top_k=0, top_p=1.0, server=url, **asked)
        return directory, Rows(Manifest.read(directory)).read(0, 99)

    return make


@pytest.fixture
def expected(chain, remake, tmp_path):
    directory = remake("responses", temperature=0.0, top_k=0, top_p=1.0, output=tmp_path / "in-process")
    return Rows(Manifest.read(directory)).read(0, 99)


def tokens(rows: list[dict]) -> list[tuple]:
    return [(row["id"], row["input_ids"], row["loss_mask"].index(True), row["ended"]) for row in rows]


def test_token_ids_are_stored_as_the_server_sampled_them(vllm_like, ask, expected, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    server = vllm_like()
    directory, rows = ask(server.url.removesuffix("/v1"))
    assert tokens(rows) == tokens(expected)
    asked = server.asked[0]
    assert asked["path"] == "/v1/completions" and asked["key"] == "sesame"
    assert asked["return_token_ids"] is True and asked["max_tokens"] == 9
    assert len({request["seed"] for request in server.asked}) == len(rows)
    assert server.most_busy <= 4
    # The weights are the server's: only their configuration is known.
    assert Manifest.read(directory).identity["target"] == {"config": server.lm.info.identity["config"]}


def test_a_refusal_that_asking_again_cannot_mend_is_one_error(vllm_like, ask):
    server = vllm_like()
    with pytest.raises(InputError, match=r"server: found .*status 404.*no model huge"):
        ask(server.url, server_model="huge")
    assert len({request["seed"] for request in server.asked}) == len(server.asked)  # nothing was asked again


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"server": "127.0.0.1:8000/v1"}, "server"),
        ({"server": "http://[::1/v1"}, "server"),
        ({"server": "http://h:65536/v1"}, "server: found 'http://h:65536/v1', expected http"),
        ({"server": "http://h:0"}, "server: found 'http://h:0', expected http"),
        ({"server": "http:///v1"}, "server: found 'http:///v1', expected http"),
        ({"server": "http://h/v1?key=abc"}, r"server: found an address with @, \? or #, expected"),
        ({"server": "http://me:a/b@h:x/v1"}, r"server: found an address with @"),
    ],
)
def test_settings_that_cannot_work_are_refused(remake, settings, what):
    with pytest.raises(InputError, match=what):
        remake("responses", engine="openai", **settings)


def test_the_next_shard_is_asked_for_where_there_is_room(vllm_like, ask, expected):
    """Four requests at once, three rows in a shard: the server replies only when a fourth request has come."""
    server, gate = vllm_like(), threading.Barrier(4, timeout=20)

    def together(body: dict) -> None:
        with server.lock:
            early = len(server.asked) <= 4
        if early:
            gate.wait()

    server.misbehave = together
    assert tokens(ask(server.url)[1]) == tokens(expected)
    assert server.most_busy == 4


def test_failed_attempts_are_logged(vllm_like, ask, monkeypatch, capsys):
    monkeypatch.setattr(http, "RETRIES", 1)
    monkeypatch.setattr(http, "NOTE_EVERY_S", 0.0)
    server = vllm_like()
    server.misbehave = lambda body: time.sleep(1.0) or (503, {}, {})
    with pytest.raises(InputError, match=r"no whole answer in 0\.3 s in 2 attempts"):
        ask(server.url, timeout_s=0.3)
    log = " ".join(capsys.readouterr().err.split())
    assert f"{server.url}/completions: attempt 1 of 2 failed: no whole answer in 0.3 s" in log


def test_a_server_that_is_not_there_is_one_line(ask, monkeypatch, capsys):
    monkeypatch.setattr(http, "RETRIES", 1)
    with pytest.raises(InputError, match=r"^server: found no connection to http://127.0.0.1:9/v1 \(.*\), "):
        ask("http://127.0.0.1:9/v1")
    assert capsys.readouterr().err.count("attempt 1 of 2 failed: ConnectError") == 1


def refusing(*prompts: list[int]) -> Callable[[dict], object]:
    return lambda body: (400, {}, {"error": "too rude"}) if body["prompt"] in prompts else None


def prompt_of(rows: list[dict], number: int) -> list[int]:
    return rows[number]["input_ids"][: rows[number]["loss_mask"].index(True)]


def test_a_refused_prompt_is_named_and_the_same_command_continues_with_its_shard(vllm_like, ask, expected, tmp_path):
    server = vllm_like()
    server.misbehave = refusing(prompt_of(expected, 4))
    with pytest.raises(InputError, match=r"1 prompts of a shard: prompt 4 \(id row-4\): status 400, .*too rude"):
        ask(server.url)
    made = {path.name for path in (tmp_path / "responses").iterdir()}
    assert "shard-00000.done.json" in made and not made & {"shard-00001.done.json", "manifest.json"}
    server.misbehave = lambda body: None
    server.asked.clear()
    assert tokens(ask(server.url)[1]) == tokens(expected)
    # Of the first run, requests that were canceled may still arrive.
    asked_again = {tuple(request["prompt"]) for request in server.asked}
    assert asked_again == {tuple(prompt_of(expected, number)) for number in range(3, 11)}


def test_prompts_without_an_answer_are_dropped_and_counted_where_that_is_allowed(
    vllm_like, ask, expected, capsys, tmp_path
):
    server = vllm_like()
    server.misbehave = refusing(prompt_of(expected, 4), prompt_of(expected, 9), prompt_of(expected, 10))
    with pytest.raises(InputError, match="prompt 10"):
        ask(server.url, max_failed=1)
    server.misbehave = refusing(prompt_of(expected, 4), prompt_of(expected, 9))
    directory, rows = ask(server.url, max_failed=1)
    assert tokens(rows) == [row for row in tokens(expected) if row[0] not in ("row-4", "row-9")]
    counts = Manifest.read(directory).counts
    assert (counts["read"], counts["rows"], counts["failed_dropped"]) == (11, 9, 2)
    assert "read 11, kept 9, dropped 2: failed 2" in " ".join(capsys.readouterr().out.split())


MISBEHAVIORS: dict[str, tuple[Callable[[], object], str]] = {
    # Single bytes without end, each before a read would time out.
    "drips": (lambda: (200, {"Content-Length": "100000"}, drip(b" ", lambda: time.sleep(0.02))),
              r"prompt \d .*no whole answer in 0\.4 s"),
    "cuts the connection": (lambda: (200, {"Content-Length": "500"}, b'{"choices": ['),
                            r"prompt \d .*RemoteProtocolError"),
    "is a web page": (lambda: (200, {"Content-Type": "text/html"}, "<html>hello"), "server: found .*<html>"),
    "sends without end": (lambda: drip(b" " * 2**16, lambda: None), r"prompt \d .*more than 1,048,576 bytes"),
    "packs too much": (lambda: (200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(2**24))),
                       r"prompt \d .*more than 1,048,576 bytes"),
    "wants a key": (lambda: (401, {}, "no"), r"status 401, no.*OPENAI_API_KEY.*--api-key-env"),
    "points elsewhere": (lambda: (307, {"Location": "/v1/completions"}, b""), "server: found .*status 307"),
}  # fmt: skip


@pytest.mark.parametrize("how", MISBEHAVIORS)
def test_a_misbehaving_server_is_one_error(vllm_like, ask, how, monkeypatch):
    monkeypatch.setattr(http.Server.ask, "__defaults__", (2**20,))
    monkeypatch.setattr(http, "RETRIES", 0)
    server = vllm_like()
    reply, what = MISBEHAVIORS[how]
    server.misbehave = lambda body: reply()
    with pytest.raises(InputError, match=what):
        ask(server.url, timeout_s=0.4 if how == "drips" else 20.0)


def test_a_server_is_left_alone_as_long_as_it_asks_for(vllm_like, ask, expected, monkeypatch):
    server, waits, sleep = vllm_like(), [], asyncio.sleep
    soon = email.utils.formatdate(time.time() + 31, usegmt=True)
    refusals = iter(["7", "9999", "0", "nan", "soon", soon])

    def misbehave(body: dict) -> object:
        after = next(refusals, None)
        return None if after is None else (429, {"Retry-After": after}, {"error": "busy"})

    async def slept(seconds: float, *args: object) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", slept)
    server.misbehave = misbehave
    assert tokens(ask(server.url, concurrency=1)[1]) == tokens(expected)
    asked = [seconds for seconds in waits if seconds]
    # A server that asks for no time is asked again as late as one that says nothing.
    assert asked[:2] == [7.0, MAX_WAIT_S] and len(asked) == 6 and max(asked) == MAX_WAIT_S and asked[5] > 25


GOOD = {"text": "def add", "finish_reason": "length"}
BAD_REPLIES: list[tuple[object, str]] = [
    ("hello", "expected an object"),
    ({"choices": []}, "expected finish_reason"),
    ({"choices": [{"text": "a", "finish_reason": "content_filter"}]}, "finish_reason"),
    ({"choices": [{**GOOD, "token_ids": [-1]}]}, "token id -1"),
    ({"choices": [{**GOOD, "token_ids": [999_999]}]}, "token id 999999"),
    ({"choices": [{**GOOD, "token_ids": [5] * 10}]}, "10 token ids where at most 9"),
    ({"choices": [{**GOOD, "token_ids": []}]}, "0 tokens, expected one or more"),
    ({"choices": [{**GOOD, "text": 5}]}, "text: 5"),
    ({"choices": [GOOD]}, "a reply without token ids, expected a vLLM or SGLang"),
    ({"choices": [GOOD], "usage": {"completion_tokens": 10}}, "completion_tokens 10, expected at most 9"),
    # Ids of another tokenizer, and with the prompt in front.
    ({"choices": [{**GOOD, "token_ids": [70, 71]}]}, "the text 'def add' with token ids of '[^d]"),
    (
        {
            "choices": [{"text": "", "finish_reason": "length", "token_ids": [4, 5, 70]}],
            "usage": {"completion_tokens": 1},
        },
        "3 token ids with completion_tokens 1",
    ),
]
PROMPT = {"prompt_ids": [4, 5]}


@pytest.fixture
def engine(chain) -> ServerEngine:
    settings = AnswerSettings(Checkpoint(chain.target), SamplingParams(), 9, False, 0)
    return ServerEngine(ServerConfig(server_model="tiny"), settings, "")


@pytest.mark.parametrize(("reply", "what"), BAD_REPLIES)
def test_a_reply_is_checked_against_vocabulary_limits_and_itself(engine, reply, what):
    with pytest.raises(RowError, match=what):
        engine.read(3, PROMPT, reply)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"model": "huge"}, r"server_model: found a reply by 'huge', expected 'tiny'"),
        ({"usage": {"prompt_tokens": 3}}, "prompt 3: found 3 tokens at the server"),
        (
            {"choices": [{**GOOD, "prompt_token_ids": [4, 6]}], "usage": {"prompt_tokens": 2}},
            "prompt 3: found 2 tokens at the server, other ones, expected 2, as here",
        ),
    ],
)
def test_another_model_or_template_ends_the_stage(engine, fields, what):
    with pytest.raises(InputError, match=what):
        engine.read(3, PROMPT, {"choices": [GOOD], **fields})


def test_an_end_token_is_added_only_where_the_server_hides_one(engine):
    ids = engine.tokenizer("def add", add_special_tokens=False)["input_ids"]
    end = engine.eos_ids[0]
    for count, whole in ((len(ids) + 1, [*ids, end]), (len(ids), ids)):  # equal counts: a stop string ended it
        choice = {"text": "def add", "finish_reason": "stop", "token_ids": list(ids)}
        turn = engine.read(3, PROMPT, {"choices": [choice], "usage": {"completion_tokens": count}})
        assert (turn.tokens, turn.ended) == (whole, whole != ids)


def test_a_hidden_end_token_is_the_one_that_the_template_or_the_server_names(tmp_path):
    """Base models list the end of a document before the end of a turn."""
    target = chat_model(tmp_path / "target", CHATML, "<|eos|>", ("<|im_end|>",))
    tokenizer = load_tokenizer(str(target))
    eos, im_end, plain = map(tokenizer.convert_tokens_to_ids, ("<|eos|>", "<|im_end|>", "<s>"))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [plain, eos, im_end]}))
    settings = AnswerSettings(Checkpoint(target), SamplingParams(), 9, False, 0)
    for template, told, end in (
        (template_hash(tokenizer), {}, im_end),
        (template_hash(tokenizer), {"stop_reason": eos}, eos),  # vLLM
        (template_hash(tokenizer), {"stop_reason": None, "matched_stop": plain}, plain),  # SGLang
        (template_hash(tokenizer), {"stop_reason": "\n"}, im_end),
        ("another", {}, eos),
    ):
        engine = ServerEngine(ServerConfig(server_model="tiny"), settings, template)
        choice = {"text": "Sure.", "finish_reason": "stop", "token_ids": tokenizer("Sure.")["input_ids"], **told}
        turn = engine.read(3, PROMPT, {"choices": [choice]})
        assert (turn.tokens[-1], turn.tokens[:-1], turn.ended) == (end, choice["token_ids"], True)


def test_tokens_behind_an_end_token_are_refused(chain, engine):
    ids = engine.tokenizer("def add", add_special_tokens=False)["input_ids"]
    choice = {"finish_reason": "length", "token_ids": [ids[0], engine.eos_ids[-1], *ids[1:]]}
    with pytest.raises(RowError, match=rf"tokens behind the end token {engine.eos_ids[-1]}, expected a server that st"):
        engine.read(3, PROMPT, {"choices": [choice]})
    engine.settings = AnswerSettings(Checkpoint(chain.target), SamplingParams(), 9, True, 0)
    assert not engine.read(3, PROMPT, {"choices": [choice]}).ended


def test_texts_of_the_same_ids_may_differ_in_blanks_halves_and_a_hidden_end(engine):
    """vLLM holds back the bytes of half a character, and the text of the token at which it stops."""
    ids = engine.tokenizer(" def add ☕", add_special_tokens=False)["input_ids"]
    assert len(engine.tokenizer("☕", add_special_tokens=False)["input_ids"]) == 3
    for own, text in ((ids, "def add ☕"), (ids[:-1], " def add "), (ids[:-1], " def add \ufffd"), (ids[:2], " def")):
        choice = {"text": text, "finish_reason": "length", "token_ids": own}
        assert engine.read(3, PROMPT, {"choices": [choice]}).tokens == own

"""The `openai` engine against real HTTP servers: `transformers serve`, and one that speaks vLLM's dialect."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tiny_models import CONTEXT, tiny_tokenizer

from draftsmith.data.engines import openai
from draftsmith.data.engines.openai import MAX_WAIT_S, BadReply, ServerConfig, ServerEngine
from draftsmith.data.engines.own import generate_all
from draftsmith.data.inspect import InspectConfig, run
from draftsmith.data.models.loading import load_lm
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.modules.types import InputError, SamplingParams


class VllmLike(ThreadingHTTPServer):
    """Server of completions by a tiny model, which records every request in `asked`.

    misbehave: called first; returns True if it has replied itself.
    """

    daemon_threads = True

    def __init__(self, lm, returns_ids: bool = True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lm, self.returns_ids = lm, returns_ids
        self.asked: list[dict] = []
        self.lock = threading.Lock()
        self.running = self.most_running = 0
        self.misbehave: Callable[[Handler, dict], bool] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: VllmLike
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        if server.misbehave is not None and server.misbehave(self, body):
            pass
        elif body["model"] != "tiny":
            self.reply(404, {"error": f"no model {body['model']}"})
        else:
            self.reply(200, self.complete(body))
        with server.lock:
            server.running -= 1

    def complete(self, body: dict) -> dict:
        server = self.server
        with server.lock:  # the lean model's caches are per session, but one core is enough
            params = SamplingParams(body["temperature"])
            (ids,) = generate_all(server.lm, [body["prompt"]], params, body["max_tokens"], 32)
        stop = ids[-1] in server.lm.info.eos_ids
        choice = {
            "text": tiny_tokenizer().decode(ids, skip_special_tokens=True),
            "finish_reason": "stop" if stop else "length",
        }
        if server.returns_ids and body.get("return_token_ids"):
            choice["token_ids"] = ids
        return {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}}

    def reply(self, status: int, content: dict, **headers: str) -> None:
        self.send(status, json.dumps(content).encode(), **headers)

    def send(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def vllm_like(chain):
    servers = []

    def start(**settings) -> VllmLike:
        server = VllmLike(load_lm(str(chain.target)), **settings)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def ask(chain, remake):
    """Generate greedy responses through a server; returns (directory, rows)."""

    def make(url: str, **settings):
        config = ServerConfig(url=url, **{"model": "tiny", "concurrency": 4, **settings})
        directory = remake("responses", engine="openai", temperature=0.0, top_k=0, top_p=1.0, server=config)
        return directory, Rows(directory, Manifest.read(directory)).read(0, 99)

    return make


@pytest.fixture
def expected(chain, remake, tmp_path):
    directory = remake("responses", temperature=0.0, top_k=0, top_p=1.0, output=tmp_path / "in-process")
    return Rows(directory, Manifest.read(directory)).read(0, 99)


def tokens(rows: list[dict]) -> list[tuple]:
    return [(row["id"], row["input_ids"], row["loss_mask"].index(True), row["ended"]) for row in rows]


def test_token_ids_are_stored_as_the_server_sampled_them(vllm_like, ask, expected, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    server = vllm_like()
    directory, rows = ask(server.url)
    assert tokens(rows) == tokens(expected)
    assert not any(row["retokenised"] for row in rows)
    asked = server.asked[0]
    assert asked["path"] == "/v1/completions" and asked["key"] == "Bearer sesame"
    assert asked["return_token_ids"] is True and asked["max_tokens"] == 9
    assert len({request["seed"] for request in server.asked}) == len(rows)
    assert server.most_running <= 4
    # The weights are the server's: only their configuration is known.
    assert Manifest.read(directory).identity["target"] == {"config": server.lm.info.identity["config"]}


def test_a_server_that_returns_only_text_gives_marked_rows(vllm_like, ask, capsys):
    directory, rows = ask(vllm_like(returns_ids=False).url)
    assert all(row["retokenised"] for row in rows)
    for row in rows:
        assert (
            row["input_ids"][row["loss_mask"].index(True) :]
            == tiny_tokenizer()(row["text"], add_special_tokens=False)["input_ids"]
        )
    run(InspectConfig(directory, rows=0))
    assert "re-tokenised text" in capsys.readouterr().out.replace("\n", " ")
    assert Manifest.read(directory).counts["retokenised"] == len(rows)


def test_a_refusal_that_asking_again_cannot_mend_is_one_error(vllm_like, ask):
    server = vllm_like()
    with pytest.raises(InputError, match=r"server: found .*status 404.*no model huge"):
        ask(server.url, model="huge")
    assert len(server.asked) <= 4  # nobody asked again


@pytest.mark.parametrize(
    ("settings", "changes", "what"),
    [
        ({"dialect": "openai"}, {"top_k": 5}, "the OpenAI protocol has no top_k"),
        ({"concurrency": 0}, {}, "server.concurrency"),
        ({"timeout_s": float("inf")}, {}, "server.timeout_s"),
        ({"retries": -1}, {}, "server.retries"),
        ({"url": "127.0.0.1:8000/v1"}, {}, "server.url"),
        ({"url": "http://[::1/v1"}, {}, "server.url"),
        ({"url": "http://h/v1?key=abc"}, {}, r"server.url: found an address with @, \? or #, expected"),
        ({"url": "http://me:a/b@h:x/v1"}, {}, r"server.url: found an address with @"),
    ],
)
def test_settings_that_cannot_work_are_refused(remake, settings, changes, what):
    with pytest.raises(InputError, match=what):
        remake("responses", engine="openai", server=ServerConfig(**settings), **changes)


def test_messages_need_the_servers_own_template(chain, remake, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    prompts = remake("prompts", chat_template=path)
    with pytest.raises(InputError, match="chat_template: found prompts with another one than the server's"):
        remake("responses", engine="openai", top_k=0, prompts=prompts, server=ServerConfig(dialect="openai"))


def test_the_next_shard_is_asked_for_where_there_is_room(vllm_like, ask, expected):
    """Four requests at once, three rows in a shard: the server replies only when a fourth request has come."""
    server, gate = vllm_like(), threading.Barrier(4, timeout=20)

    def together(handler: Handler, body: dict) -> bool:
        with server.lock:
            early = len(server.asked) <= 4
        if early:
            gate.wait()
        return False

    server.misbehave = together
    assert tokens(ask(server.url)[1]) == tokens(expected)
    assert server.most_running == 4


def test_the_manifest_records_the_server(vllm_like, ask, monkeypatch):
    pages = {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "tiny", "owned_by": "vllm"}]}}
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.reply(200, pages[self.path]), raising=False)
    assert Manifest.read(ask(vllm_like().url)[0]).packages["server"] == "vllm 0.32.0"


def test_a_version_that_never_ends_is_unknown(vllm_like, ask, monkeypatch):
    monkeypatch.setattr(openai, "VERSION_TIMEOUT_S", 0.1)
    monkeypatch.setattr(Handler, "do_GET", lambda self: dripping(self), raising=False)
    assert Manifest.read(ask(vllm_like().url)[0]).packages["server"] == "unknown"


def test_failed_attempts_are_logged(vllm_like, ask, monkeypatch, capsys):
    monkeypatch.setattr(openai, "NOTE_EVERY_S", 0.0)
    server = vllm_like()
    server.misbehave = lambda handler, body: time.sleep(1.0) is None
    with pytest.raises(InputError, match=r"no whole answer in 0\.3 s in 2 attempts"):
        ask(server.url, retries=1, timeout_s=0.3)
    log = " ".join(capsys.readouterr().err.split())
    assert f"{server.url}/completions: attempt 1 of 2 failed: Unavailable no whole answer in 0.3 s" in log


def refusing(*prompts: list[int]) -> Callable[[Handler, dict], bool]:
    def misbehave(handler: Handler, body: dict) -> bool:
        if body["prompt"] in prompts:
            handler.reply(400, {"error": "too rude"})
        return body["prompt"] in prompts

    return misbehave


def prompt_of(rows: list[dict], number: int) -> list[int]:
    return rows[number]["input_ids"][: rows[number]["loss_mask"].index(True)]


def test_a_refused_prompt_is_named_and_the_same_command_asks_for_it_again(vllm_like, ask, expected, tmp_path):
    server = vllm_like()
    server.misbehave = refusing(prompt_of(expected, 4))
    what = r"1 of 3 prompts: prompt 4 \(id row-4\): status 400, .*too rude.*--server.max-failed"
    with pytest.raises(InputError, match=what):
        ask(server.url)
    made = {path.name for path in (tmp_path / "responses").iterdir()}
    assert {"shard-00000.done.json", "shard-00001.answers.json"} <= made and "manifest.json" not in made
    server.misbehave = None
    server.asked.clear()
    directory, rows = ask(server.url)
    assert tokens(rows) == tokens(expected)
    # Responses of its shard, and of the next one where slots were free, were kept.
    asked_again = [request["prompt"] for request in server.asked]
    assert prompt_of(expected, 4) in asked_again and prompt_of(expected, 9) in asked_again
    assert not any(prompt_of(expected, number) in asked_again for number in (0, 1, 2, 3, 5))
    assert len(asked_again) == len(set(map(tuple, asked_again)))
    assert not list(directory.glob("*.answers.json"))


def test_prompts_without_an_answer_are_dropped_and_counted_where_that_is_allowed(
    vllm_like, ask, expected, capsys, tmp_path
):
    server = vllm_like()
    server.misbehave = refusing(prompt_of(expected, 4), prompt_of(expected, 9))
    with pytest.raises(InputError, match="prompt 9"):
        ask(server.url, max_failed=1)
    directory, rows = ask(server.url, max_failed=2)
    assert tokens(rows) == [row for row in tokens(expected) if row[0] not in ("row-4", "row-9")]
    counts = Manifest.read(directory).counts
    assert (counts["read"], counts["rows"], counts["failed_dropped"]) == (11, 9, 2)
    assert "read 11, kept 9, dropped 2: failed 2" in " ".join(capsys.readouterr().out.split())


def dripping(handler: Handler) -> None:
    """Send single bytes without end, each before a read would time out."""
    handler.send(200, b"", Content_Length="100000")
    try:
        while True:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)
    except OSError:
        pass


def cut_off(handler: Handler) -> None:
    handler.send(200, b'{"choices": [', Content_Length="500")
    handler.close_connection = True


MISBEHAVIOURS: dict[str, tuple[Callable[[Handler], None], str]] = {
    "drips": (dripping, r"prompt 0 .*no whole answer in 0\.4 s"),
    "cuts the connection": (cut_off, r"prompt 0 .*RemoteProtocolError"),
    "sends half a JSON": (lambda h: h.send(200, b'{"choices": [{"te'), "prompt 0 .*not JSON but"),
    "is a web page": (lambda h: h.send(200, b"<html>hello", Content_Type="text/html"), "server: found .*<html>"),
    "points elsewhere": (
        lambda h: h.send(307, b"", Location=h.path),
        r"server\.url: found .*status 307, a redir",
    ),
    "packs a bomb": (
        lambda h: h.send(200, zlib.compress(b" " * (17 << 20)), Content_Encoding="deflate"),
        "prompt 0 .*more than 16,777,216 bytes",
    ),
    "packs badly": (lambda h: h.send(200, b"no zip", Content_Encoding="gzip"), "prompt 0 .*DecodingError"),
}


@pytest.mark.parametrize("how", MISBEHAVIOURS)
def test_a_misbehaving_server_is_one_error(vllm_like, ask, how):
    server = vllm_like()
    reply, what = MISBEHAVIOURS[how]
    server.misbehave = lambda handler, body: reply(handler) is None
    with pytest.raises(InputError, match=what):
        ask(server.url, retries=0, timeout_s=0.4 if how == "drips" else 20.0)


def test_a_server_is_left_alone_as_long_as_it_asks_for(vllm_like, ask, expected, monkeypatch):
    server, waits, sleep = vllm_like(), [], asyncio.sleep
    refusals = iter(["7", "9999", "nan", "soon"])

    def misbehave(handler: Handler, body: dict) -> bool:
        after = next(refusals, None)
        if after is not None:
            handler.reply(429, {"error": "busy"}, Retry_After=after)
        return after is not None

    async def slept(seconds: float, *args: object) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", slept)
    server.misbehave = misbehave
    assert tokens(ask(server.url, concurrency=1)[1]) == tokens(expected)
    asked = [seconds for seconds in waits if seconds]
    assert asked[:2] == [7.0, MAX_WAIT_S] and all(seconds <= MAX_WAIT_S for seconds in asked[2:])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def transformers_serve(chain, tmp_path_factory):
    """The url of `transformers serve` on loopback, offline."""
    port, log = free_port(), tmp_path_factory.mktemp("serve") / "log.txt"
    code = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", code, "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--dtype", "float32"], stdout=output, stderr=output, env=environment)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, log.read_text()
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_transformers_serve_answers_as_the_model_does_in_process(transformers_serve, ask, expected, chain):
    _, rows = ask(transformers_serve, model=str(chain.target), dialect="transformers")
    assert all(row["retokenised"] for row in rows)
    tokenizer = tiny_tokenizer()
    for row, ours in zip(rows, expected, strict=True):
        sampled = ours["input_ids"][ours["loss_mask"].index(True) :]
        assert row["text"] == tokenizer.decode(sampled, skip_special_tokens=True)
        assert row["server_tokens"] == len(sampled)
        assert row["input_ids"][: row["loss_mask"].index(True)] == ours["input_ids"][: ours["loss_mask"].index(True)]


@pytest.mark.slow
def test_transformers_serve_samples_when_told_to(transformers_serve, chain, remake, tmp_path):
    server = ServerConfig(url=transformers_serve, model=str(chain.target), dialect="transformers")
    settings = {"engine": "openai", "server": server, "max_new_tokens": 24, "limit": 3}

    def texts(name: str, **changes) -> list[str]:
        directory = remake("responses", output=tmp_path / name, **{**settings, **changes})
        return [row["text"] for row in Rows(directory, Manifest.read(directory)).read(0, 9)]

    greedy = texts("greedy", temperature=0.0)
    assert texts("almost-greedy", temperature=1e-4, top_k=0, top_p=1.0) == greedy
    assert texts("first-of-one", temperature=1.0, top_k=1, top_p=1.0) == greedy
    assert texts("sampled", temperature=1.0, top_k=0, top_p=1.0) != greedy
    assert len(greedy) == 3 and CONTEXT > 24


GOOD = {"text": "def add", "finish_reason": "length"}
BAD_REPLIES: list[tuple[object, str]] = [
    ("hello", "no completion"),
    ({"choices": [{"text": "a", "finish_reason": "content_filter"}]}, "finish_reason"),
    *(
        ({"choices": [{**GOOD, "token_ids": ids}]}, what)
        for ids, what in [
            ([-1], "token id -1"), ([999_999], "token id 999999"), ([None], "token id null"), ([True], "token id true"),
            ({"5": 1}, "token_ids are"), ([5] * 100_000, "100,000 token ids where at most 9"), ([], "an empty|text"),
        ]
    ),
    ({"choices": [{**GOOD, "text": 5}]}, "text is 5"),
    ({"choices": [{**GOOD, "text": None}]}, "neither text nor token ids"),
    ({"choices": [{**GOOD, "text": ""}]}, "an empty response"),
    ({"choices": [{**GOOD, "text": "a\ud800"}]}, "half of a surrogate pair"),
    ({"choices": [{**GOOD, "text": "def " * 1000}]}, "a text of .* tokens where at most 9"),
    ({"choices": [GOOD], "usage": {"completion_tokens": "7"}}, "completion_tokens"),
    ({"choices": [GOOD], "usage": {"completion_tokens": 10}}, "completion_tokens 10, expected at most 9"),
    ({"choices": [{**GOOD, "text": "import os", "token_ids": "DEF"}]}, "another tokenizer"),
    ({"choices": [{**GOOD, "token_ids": "DEF"}], "usage": {"completion_tokens": 9}}, "completion_tokens 9"),
    (
        {"choices": [{"finish_reason": "stop", "message": {"content": "def", "reasoning_content": "hm"}}]},
        "reasoning_content",
    ),
]  # fmt: skip
PROMPT = {"prompt_ids": [4, 5]}


@pytest.fixture
def engine(chain) -> ServerEngine:
    settings = AnswerSettings(str(chain.target), SamplingParams(), 9, False, 0)
    return ServerEngine(ServerConfig(model="tiny"), settings, "")


@pytest.mark.parametrize("number", range(len(BAD_REPLIES)))
def test_a_reply_is_checked_against_vocabulary_limits_and_itself(engine, number):
    reply, what = json.loads(json.dumps(BAD_REPLIES[number]))
    if isinstance(reply, dict) and reply["choices"] and reply["choices"][0]:
        (choice,) = reply["choices"]
        if choice.get("token_ids") == "DEF":
            choice["token_ids"] = engine.tokenizer("def add", add_special_tokens=False)["input_ids"]
    with pytest.raises(BadReply, match=what):
        engine.read(3, PROMPT, reply)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"model": "huge"}, r"server\.model: found a reply by 'huge', expected 'tiny'"),
        ({"usage": {"prompt_tokens": 3}}, "prompt 3: found 3 tokens at the server"),
        ({"prompt_token_ids": [4, 6]}, r"prompt 3: found the prompt \[4, 6\] at the server"),
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

"""Responses from an OpenAI-compatible server: vLLM, SGLang, `transformers serve` or any other.

A server samples with its own random numbers, so a rebuilt shard can hold other tokens, with seeds or without. Returned
token ids are stored; if only text comes back, it is tokenized again and the row is marked. A prompt without a usable
reply ends the stage after its shard, or is dropped and counted (`max_failed`). Finished responses of an unfinished
shard are kept for the next start.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from draftsmith.data.console import Advance, log_note
from draftsmith.data.models.checkpoint import end_tokens
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.identity import config_hash, template_hash
from draftsmith.data.models.loading import load_tokenizer, read_config
from draftsmith.data.ranks import place
from draftsmith.data.store.files import write_json
from draftsmith.data.store.manifest import volatile
from draftsmith.data.store.reading import misfits, read_object
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import DONE, Shard, ShardContent, read_done
from draftsmith.data.text.template import check_context, context_length
from draftsmith.data.text.turns import AnswerSettings, BeginConversation, Conversation, TargetTurn, shard_content
from draftsmith.modules.types import InputError, at_least

if TYPE_CHECKING:
    import httpx

RETRIED_STATUS = {408, 409, 425, 429}  # and 500 or above: busy, restarting, overloaded
PROMPT_STATUS = {400, 413, 422}  # other statuses of 400 and above concern the address, the key or the model
MAX_WAIT_S = 60.0  # between attempts
VERSION_TIMEOUT_S = 10.0
NOTE_EVERY_S = 30.0  # while the server is unavailable
MAX_REPLY_BYTES = 16 * 2**20  # unpacked
SHOWN_CHARS = 200  # of a reply, in errors
SHOWN_FAILURES = 3
# A text that is tokenized again may have this many times the sampled tokens.
MAX_RETOKENISED = 8
STORED_ROW = {"id": str, "input_ids": [int], "loss_mask": [bool], "turn": int, "ended": bool}


class BadReply(Exception):
    """An unusable reply to one prompt; other prompts may succeed."""


class GaveUp(BadReply):
    """No reply after all attempts."""


class Unavailable(Exception):
    """A failure that another attempt may mend. retry_after_s: wait that the server asked for."""

    def __init__(self, message: str, retry_after_s: float = 0.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class ServerConfig:
    """An OpenAI-compatible server.

    Attributes:
        url: Base address with its version, such as http://127.0.0.1:8000/v1.
        model: Name of the model at the server; default: the value of `target`.
        dialect: vllm sends and receives token ids; transformers (its `serve`) and openai send chat messages and receive
            text. openai has no top_k.
        concurrency: Requests in flight at once.
        timeout_s: Longest wait for one whole reply, in seconds.
        retries: Further attempts after a failure, with waits that double from half a second or follow Retry-After, at
            most a minute each.
        max_failed: Prompts that may fail; they are dropped and counted. With more failures the stage ends, and the same
            command asks for them again.
        api_key_env: Environment variable that holds the API key.
    """

    url: str = volatile("http://127.0.0.1:8000/v1")
    model: str | None = volatile(None)
    dialect: Literal["vllm", "transformers", "openai"] = "vllm"
    concurrency: int = volatile(32)
    timeout_s: float = volatile(600.0)
    retries: int = volatile(6)
    max_failed: int = volatile(0)
    api_key_env: str = volatile("OPENAI_API_KEY")

    def __post_init__(self) -> None:
        for name, least in {"concurrency": 1, "retries": 0, "max_failed": 0}.items():
            at_least(f"server.{name}", getattr(self, name), least)
        if not 0 < self.timeout_s < math.inf:
            raise InputError("server.timeout_s", self.timeout_s, "a positive number of seconds", "Correct it.")
        # An address with a password or a key is neither shown nor stored in a manifest.
        if {"@", "?", "#"} & set(self.url):
            remedy = "Set the environment variable that --server.api-key-env names."
            raise InputError("server.url", "an address with @, ? or #", "no user, password or query", remedy)
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or not self.url.isprintable() or " " in self.url:
            raise InputError("server.url", repr(self.url), "http://HOST:PORT/v1, or https", "Correct it.")


class ServerEngine:
    """Requests to a server and checks of its replies.

    template: hash of the prompts' chat template; messages go through the server's own.
    """

    def __init__(self, server: ServerConfig, settings: AnswerSettings, template: str):
        need_extra()
        self.server, self.settings, self.params = server, settings, settings.params
        # The server may know the model by another name than the path that we load its tokenizer from.
        self.model = server.model or settings.target
        self.tokenizer = load_tokenizer(settings.target)
        config = read_config(settings.target)
        self.eos_ids = end_tokens(model_directory(settings.target), config)
        self.context = context_length(settings.target)
        self.vocab_size: int = (config.get("text_config") or config).get("vocab_size") or len(self.tokenizer)
        self.key = api_key(server)
        self._last_note = time.monotonic()
        # The weights are at the server: only their configuration is known here.
        self.identity = {"config": config_hash(config)}
        if server.dialect != "vllm" and settings.ignore_eos:
            remedy = "Pass --server.dialect vllm, or generate in process."
            raise InputError("ignore_eos", f"dialect {server.dialect}", "a server that supports it: vllm", remedy)
        if server.dialect == "openai" and self.params.top_k:
            remedy = "Pass --top-k 0, or another --server.dialect."
            raise InputError("top_k", self.params.top_k, "0: the OpenAI protocol has no top_k", remedy)
        if server.dialect != "vllm" and template != template_hash(self.tokenizer):
            remedy = "Pass --server.dialect vllm, which sends token ids, or save the template with the model."
            raise InputError("chat_template", "prompts with another one than the server's", "the target's own", remedy)

    def limit(self, row: dict[str, Any]) -> int:
        """Return the most response tokens that fit behind this prompt."""
        most = self.settings.max_new_tokens
        return most if self.context is None else min(most, self.context - len(row["prompt_ids"]))

    def request(self, number: int, row: dict[str, Any], turn: int = 1) -> tuple[str, dict[str, Any]]:
        """Build endpoint and body of the request for one turn of conversation `number`."""
        params, limit = self.params, self.limit(row)
        body: dict[str, Any] = {"model": self.model, "seed": self.settings.row_seed(number, turn)}
        if self.server.dialect == "vllm":
            top_k = params.top_k or -1
            body |= {"prompt": row["prompt_ids"], "max_tokens": limit, "temperature": params.temperature}
            body |= {"top_p": params.top_p, "top_k": top_k, "return_token_ids": True, "repetition_penalty": 1.0}
            body |= {"ignore_eos": True} if self.settings.ignore_eos else {}
            return "completions", body
        body["messages"] = json.loads(row["messages"])
        if self.server.dialect == "openai":
            body |= {"max_tokens": limit, "temperature": params.temperature, "top_p": params.top_p}
            return "chat/completions", body
        # `transformers serve` ignores the temperature where the model's own generation config does not sample; it only
        # obeys a whole generation config.
        generation: dict[str, Any] = {"max_new_tokens": limit, "do_sample": not params.greedy}
        if not params.greedy:
            generation |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        generation |= {"eos_token_id": list(self.eos_ids), "pad_token_id": self.tokenizer.pad_token_id}
        body["generation_config"] = json.dumps(generation)
        return "chat/completions", body

    async def ask(self, client: httpx.AsyncClient, request: tuple[str, dict[str, Any]]) -> Any:
        """Send a request and return the reply's JSON, with retries while the server is unavailable."""
        import httpx
        from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt
        from tenacity import wait_random_exponential as exponential

        endpoint, body = request
        url, attempts = f"{self.server.url.rstrip('/')}/{endpoint}", self.server.retries + 1
        # Random waits keep many clients from coming back at the same moment.
        back_off = exponential(multiplier=0.5, max=MAX_WAIT_S)

        async def post() -> Any:
            response, content = await read_whole(client, "POST", url, self.server.timeout_s, json=body)
            return parse_reply(response, content, url)

        def wait(state: Any) -> float:
            error, now = state.outcome.exception(), time.monotonic()
            if now - self._last_note >= NOTE_EVERY_S and not place().rank:
                self._last_note = now
                log_note(f"draftsmith: {url}: attempt {state.attempt_number} of {attempts} failed: {_describe(error)}")
            return max(back_off(state), min(getattr(error, "retry_after_s", 0.0), MAX_WAIT_S))

        retried = retry_if_exception_type((httpx.RequestError, Unavailable))
        try:
            return await AsyncRetrying(stop=stop_after_attempt(attempts), wait=wait, retry=retried)(post)
        except RetryError as error:
            raise GaveUp(f"{url}: {_describe(error.last_attempt.exception())} in {attempts} attempts") from error

    def read(self, number: int, row: dict[str, Any], reply: Any) -> TargetTurn:
        """Check a reply to prompt `number` and return the response.

        Raises:
            BadReply: another shape, tokens outside the vocabulary or too many, or parts that contradict each other.
            InputError: another model or chat template replied, so that no reply is usable.
        """
        choices = reply.get("choices") if isinstance(reply, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            raise BadReply(f"no completion but {_short(reply)}; check --server.url and --server.dialect")
        if choice.get("finish_reason") not in ("stop", "length"):
            raise BadReply(f"finish_reason {_short(choice.get('finish_reason'))}, expected stop or length")
        usage = reply["usage"] if isinstance(reply.get("usage"), dict) else {}
        self._check_prompt(f"prompt {number}", row["prompt_ids"], reply, choice, usage)

        limit, text = self.limit(row), _reply_text(choice)
        count = usage.get("completion_tokens")
        if count is not None and (type(count) is not int or not 0 <= count <= limit):
            raise BadReply(f"completion_tokens {_short(count)}, expected at most {limit:,}")
        ids, retokenised = choice.get("token_ids"), choice.get("token_ids") is None
        if retokenised:
            if text is None:
                raise BadReply("neither text nor token ids")
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) > MAX_RETOKENISED * limit:
                raise BadReply(f"a text of {len(ids):,} tokens where at most {limit:,} were asked for")
        else:
            ids = checked_ids(ids, limit, self.vocab_size)
            self._check_agreement(ids, text, count)

        # A text has no end token, and a server may leave it out of the ids: its count of tokens tells.
        hidden = retokenised or count is None or count > len(ids)
        if choice["finish_reason"] == "stop" and hidden and self.eos_ids and not (ids and ids[-1] in self.eos_ids):
            ids = [*ids, self.eos_ids[0]]
        if not ids:
            raise BadReply("an empty response")
        if self.context is not None and len(row["prompt_ids"]) + len(ids) > self.context:
            raise BadReply(f"{len(row['prompt_ids']) + len(ids):,} tokens with the prompt, more than the context")
        ended = ids[-1] in self.eos_ids and not self.settings.ignore_eos
        return TargetTurn(ids, ended, text, retokenised, count)

    def _check_prompt(
        self, name: str, prompt_ids: list[int], reply: dict[str, Any], choice: dict[str, Any], usage: dict[str, Any]
    ) -> None:
        """Raise InputError if another model or another prompt was used."""
        model = reply.get("model")
        # `transformers serve` adds @revision.
        if isinstance(model, str) and self.model not in (model, model.rpartition("@")[0]):
            remedy = "Serve the model of --target, and pass the name by which the server calls it."
            raise InputError("server.model", f"a reply by {model[:SHOWN_CHARS]!r}", repr(self.model), remedy)
        count, expected = usage.get("prompt_tokens"), len(prompt_ids)
        server_ids = choice.get("prompt_token_ids", reply.get("prompt_token_ids"))
        remedy = "Serve the same model and chat template as --target, or pass --server.dialect vllm."
        if count is not None and count != expected:
            raise InputError(name, f"{_short(count)} tokens at the server", f"{expected}, as here", remedy)
        if server_ids is not None and server_ids != prompt_ids:
            raise InputError(name, f"the prompt {_short(server_ids)} at the server", "the ids that were sent", remedy)

    def _check_agreement(self, ids: list[int], text: str | None, count: int | None) -> None:
        """Raise BadReply if the token ids contradict the text or the count."""
        if count is not None and count not in (len(ids), len(ids) + 1):
            raise BadReply(f"{len(ids):,} token ids and completion_tokens {count:,}")
        # A server may hold back a stop string or the bytes of half a letter, so its text may be shorter.
        decoded = [_bare(self.tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (True, False)]
        if not any(own.startswith(_bare(text or "")) for own in decoded):
            own = _short(self.tokenizer.decode(ids))
            raise BadReply(f"text {_short(text)} with token ids that decode to {own}: another tokenizer?")

    def version(self) -> str:
        """Return the server's name and version, such as `vllm 0.32.0`; `unknown` if it does not report them."""
        import httpx

        root = self.server.url.rstrip("/")

        def get(url: str) -> Any:
            try:
                response, content = fetch("GET", url, VERSION_TIMEOUT_S, self.key)
                return json.loads(content) if response.is_success else None
            except (httpx.HTTPError, Unavailable, BadReply, ValueError, RecursionError):
                return None

        models = get(f"{root}/models")
        listed = next(misfits(models, {"data": [{"owned_by": str}]}), None) is None and models["data"]
        owner = one_word(models["data"][0]["owned_by"]) if listed else "unknown"
        # vLLM reports its version on the first page, SGLang on the second.
        for page in ("version", "server_info"):
            info = get(f"{root.removesuffix('/v1')}/{page}")
            if next(misfits(info, {"version": str}), None) is None:
                return f"{owner} {one_word(info['version'])}"
        return owner


async def read_whole(
    client: httpx.AsyncClient, method: str, url: str, timeout_s: float, **options: Any
) -> tuple[httpx.Response, bytes]:
    """Send a request and read the whole reply. httpx's own timeout is per read: a slow drip would never reach it.

    Raises:
        httpx.HTTPError: no reply. Unavailable: not whole after `timeout_s`. BadReply: too long. InputError: bad host.
    """
    import httpx

    content = bytearray()
    try:
        async with asyncio.timeout(timeout_s), client.stream(method, url, **options) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MAX_REPLY_BYTES:
                    raise BadReply(f"more than {MAX_REPLY_BYTES:,} bytes")
    except TimeoutError as error:
        raise Unavailable(f"no whole answer in {timeout_s:g} s") from error
    except (httpx.InvalidURL, UnicodeError) as error:
        # `urlsplit` accepts such a host, but it is no name that can be looked up.
        raise InputError("server.url", f"{url} ({error})", "http://HOST:PORT/v1, or https", "Correct it.") from error
    return response, bytes(content)


def fetch(method: str, url: str, timeout_s: float, key: str = "", **options: Any) -> tuple[httpx.Response, bytes]:
    """Read one reply, as `read_whole`, with a client of its own."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def once() -> tuple[httpx.Response, bytes]:
        async with httpx.AsyncClient(headers=headers, timeout=timeout_s) as client:
            return await read_whole(client, method, url, timeout_s, **options)

    return asyncio.run(once())


def parse_reply(response: httpx.Response, content: bytes, url: str) -> Any:
    """Return the reply's JSON.

    Raises:
        Unavailable: another attempt may help. BadReply: this prompt is refused. InputError: every prompt would be.
    """
    status, text = response.status_code, content.decode("utf-8", "replace")[:SHOWN_CHARS]
    found = f"{url}: status {status}, {text}"
    if status in RETRIED_STATUS or status >= 500:
        # Retry-After may also be a date, or nonsense: then the usual waits apply.
        try:
            seconds = float(response.headers.get("retry-after", 0))
        except ValueError:
            seconds = 0.0
        raise Unavailable(f"status {status}: {text}", seconds if 0 < seconds < math.inf else 0.0)
    if status in PROMPT_STATUS:
        raise BadReply(f"status {status}, {text}")
    if 300 <= status < 400:
        found = f"{url}: status {status}, a redirection to {response.headers.get('location', 'nowhere')[:SHOWN_CHARS]}"
        raise InputError("server.url", found, "the server itself", "Pass its own address.")
    if status >= 400:
        raise InputError("server", found, "a reply", "Check --server.url, --server.model and --server.dialect.")
    # A web page with status 200 is another service at this address.
    if "html" in response.headers.get("content-type", ""):
        raise InputError("server", found, "JSON", "Check --server.url; it ends with /v1 at most servers.")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"not JSON but {text!r}") from error


def checked_ids(ids: Any, limit: int, vocab_size: int) -> list[int]:
    """Return at most `limit` token ids of the vocabulary; raise BadReply for anything else."""
    if not isinstance(ids, list):
        raise BadReply(f"token_ids are {_short(ids)}, expected a list")
    if len(ids) > limit:
        raise BadReply(f"{len(ids):,} token ids where at most {limit:,} were asked for")
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < vocab_size]
    if wrong:
        raise BadReply(f"token id {_short(wrong[0])}, expected whole numbers below {vocab_size:,}")
    return ids


def _reply_text(choice: dict[str, Any]) -> str | None:
    """Return the text of a choice, which must be all that was sampled."""
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    for part in ("reasoning_content", "reasoning", "tool_calls"):
        if isinstance(message, dict) and message.get(part):
            raise BadReply(f"a part of the response in {part}; serve without a parser, or pass --server.dialect vllm")
    if text is not None and not isinstance(text, str):
        raise BadReply(f"text is {_short(text)}")
    # Half of a surrogate pair cannot be stored in a Parquet file.
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise BadReply("text with half of a surrogate pair") from error
    return text


def api_key(server: ServerConfig) -> str:
    """Return the API key from the environment; empty if there is none."""
    key = os.environ.get(server.api_key_env, "")
    if not (key.isascii() and key.isprintable()):
        found = "line ends or letters that no header holds"
        raise InputError(server.api_key_env, found, "a key in plain ASCII", "Set it again.")
    return key


def need_extra() -> None:
    """Raise InputError if the packages for servers are not installed."""
    try:
        import httpx  # noqa: F401
        import tenacity  # noqa: F401
    except ImportError as error:
        remedy = "pip install 'draftsmith[serve]'"
        raise InputError("engine", f"openai without {error.name}", "the extra `serve`", remedy) from error


def one_word(text: str) -> str:
    """Return a server's own name or version if it is printable, else `unknown`."""
    return text[:SHOWN_CHARS] if text.isprintable() else "unknown"


def _describe(error: BaseException | None) -> str:
    return f"{type(error).__name__} {str(error)[:SHOWN_CHARS]}".strip()


def _bare(text: str) -> str:
    """Remove white space and replacement characters, which decoders treat differently."""
    return "".join(text.replace("\ufffd", "").split())


def _short(value: Any) -> str:
    return json.dumps(value)[:SHOWN_CHARS]


@dataclass
class _ShardState:
    """A shard in progress. rows, answers, failures: by prompt number: prompts, finished conversations, and reasons."""

    rows: dict[int, dict[str, Any]]
    kept: Path
    answers: dict[int, dict[str, Any]]
    failures: dict[int, str] = field(default_factory=dict)
    tasks: Sequence[asyncio.Task[None]] = ()


class ServerShards:
    """Context that fills shards of responses, with requests for the next shard where this one leaves room.

    On exit, finished responses of unfinished shards are stored for the next start. output: directory of the stage.
    """

    def __init__(
        self, engine: ServerEngine, prompts: Rows, begin: BeginConversation, output: Path, rows_per_shard: int
    ):
        self._engine, self._prompts, self._begin_conversation = engine, prompts, begin
        self._output, self._rows_per_shard = output, rows_per_shard
        # Shards with requests in flight, by number.
        self._active: dict[int, _ShardState] = {}
        # Failed prompts of the shards finished in this run, by the name of the shard's done-file.
        self._failed: dict[str, int] = {}
        # Set once the server is given up: no further requests are sent.
        self._stopped = False

    def __enter__(self) -> ServerShards:
        import httpx

        server = self._engine.server
        self._runner = asyncio.Runner()
        self._slots = asyncio.Semaphore(server.concurrency)
        limits = httpx.Limits(max_connections=server.concurrency)
        headers = {"Authorization": f"Bearer {self._engine.key}"} if self._engine.key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=server.timeout_s, limits=limits)
        return self

    def __exit__(self, *error: object) -> None:
        async def close() -> None:
            tasks = [task for state in self._active.values() for task in state.tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

        for state in self._active.values():
            write_json(state.kept, state.answers)
        with self._runner:
            self._runner.run(close())

    def make(self, shard: Shard, advance: Advance) -> ShardContent:
        """Generate the responses of one shard."""
        if shard.index not in self._active:
            self._start(shard, advance)
        # Requests of this rank's next unfinished shard fill the slots that this one leaves free.
        size, total = self._rows_per_shard, len(self._prompts)
        for index in range(shard.index + place().world, -(-total // size), place().world):
            following = Shard(index, index * size, min((index + 1) * size, total))
            if read_done(self._output, following) is None:
                if index not in self._active:
                    self._start(following, advance)
                break
        state = self._active[shard.index]

        async def wait() -> None:
            await asyncio.gather(*state.tasks)

        self._runner.run(wait())
        failures, limit = state.failures, self._engine.server.max_failed
        if len(failures) > self._failures_left():
            # One server fault usually hits many prompts: name each reason once.
            prompts: dict[str, list[str]] = {}
            for number, reason in sorted(failures.items()):
                prompts.setdefault(reason, []).append(f"prompt {number} (id {state.rows[number]['id']})")
            reasons = _first([f"{_first(names, ', ')}: {reason}" for reason, names in prompts.items()], "; ")
            found = f"no usable answer to {len(failures)} of {len(state.rows)} prompts: {reasons}"
            expected = f"at most {limit} without one (--server.max-failed)"
            remedy = "Run the same command again, which asks for these only, or raise --server.max-failed."
            raise InputError("server", found, expected, remedy)
        self._failed[f"{shard.name}.done.json"] = len(failures)
        del self._active[shard.index]
        state.kept.unlink(missing_ok=True)
        content = shard_content([state.answers[number] for number in state.rows if number in state.answers])
        return replace(content, counts={**content.counts, "failed_dropped": len(failures)})

    def _start(self, shard: Shard, advance: Advance) -> None:
        """Start the conversations of a shard, except those that an earlier run finished."""
        rows = dict(enumerate(self._prompts.read(shard.start, shard.stop), shard.start))
        if self._engine.context is not None:
            for number, row in rows.items():
                check_context(number, len(row["prompt_ids"]), self._engine.context)
        kept, answers = self._output / f"{shard.name}.answers.json", {}
        if kept.exists():
            stored = read_object(kept, {"*": {"rows": [STORED_ROW], "counts": {"*": int}}})
            answers = {number: stored[str(number)] for number in rows if str(number) in stored}
        state = self._active[shard.index] = _ShardState(rows, kept, answers)
        advance(len(answers))
        open_rows = ((number, row) for number, row in rows.items() if number not in answers)
        conversations = {number: self._begin_conversation(row) for number, row in open_rows}
        loop = self._runner.get_loop()
        state.tasks = [loop.create_task(self._converse(state, *item, advance)) for item in conversations.items()]

    async def _converse(self, state: _ShardState, number: int, conversation: Conversation, advance: Advance) -> None:
        """Generate one conversation. It keeps its slot, so that later turns do not wait for others to begin."""
        engine = self._engine
        async with self._slots:
            while conversation.prompt is not None:
                if self._stopped:
                    return
                try:
                    row = conversation.to_prompt_row()
                    reply = await engine.ask(self._client, engine.request(number, row, conversation.turn))
                    conversation.add_answer(engine.read(number, row, reply))
                except BadReply as error:
                    state.failures[number] = str(error)
                    failed = sum(len(other.failures) for other in self._active.values())
                    self._stopped |= isinstance(error, GaveUp) and failed > self._failures_left()
                    break
                except InputError:
                    # An InputError concerns all prompts: stop asking.
                    self._stopped = True
                    raise
            else:
                state.answers[number] = conversation.to_json()
        advance(1)

    def _failures_left(self) -> int:
        """Return how many prompts of the active shards may fail."""
        # The done-file of the last finished shard may not be written yet, so this run's shards are counted here.
        others = (path for path in self._output.glob("shard-*.done.json") if path.name not in self._failed)
        failed = sum(read_object(path, DONE)["counts"].get("failed_dropped", 0) for path in others)
        return self._engine.server.max_failed - failed - sum(self._failed.values())


def _first(texts: Sequence[str], joint: str) -> str:
    more = len(texts) - SHOWN_FAILURES
    return joint.join(texts[:SHOWN_FAILURES]) + (f" and {more} more" if more > 0 else "")

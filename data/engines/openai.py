"""Responses from a running server whose completions take token ids: vLLM, SGLang. llama.cpp's: `llamacpp.py`.

A server samples with its own random numbers, so a rebuilt shard can hold other tokens, with seeds or without. The token
ids that it returns are stored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.data.console import Advance
from draftsmith.data.engines.server import SHOWN_CHARS, Server, check_model
from draftsmith.data.ranks import place
from draftsmith.data.stages import ServerConfig
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import Shard, ShardContent, read_done
from draftsmith.data.text.template import RowError, check_context
from draftsmith.data.text.turns import AnswerSettings, BeginConversation, Conversation, TargetTurn, shard_content
from draftsmith.modules.pretrained.identity import config_hash, template_hash
from draftsmith.modules.pretrained.reading import misfits
from draftsmith.modules.pretrained.tokenizers import closing_tokens
from draftsmith.modules.types import InputError

REPLY = {
    "choices": [
        {
            "finish_reason": str,
            "text?": (str, None),
            "token_ids?": ([int], None),
        }
    ],
    "usage?": ({"prompt_tokens?": (int, None), "completion_tokens?": (int, None)}, None),
    "model?": (str, None),
}


class ServerEngine:
    """Requests to a server and checks of its replies.

    template: hash of the prompts' chat template.
    """

    def __init__(self, server: ServerConfig, settings: AnswerSettings, template: str):
        self.connection = Server(server)
        self.server, self.settings, self.params = server, settings, settings.params
        # The server may know the model by another name than the path that we load its tokenizer from.
        self.model = server.server_model or settings.target.path
        self.tokenizer, self.eos_ids = settings.target.tokenizer, settings.target.end_tokens
        # What closes an answer in another template than the target's own is not known here.
        closing = closing_tokens(self.tokenizer) if template == template_hash(self.tokenizer) else ()
        likely = (*closing, self.tokenizer.eos_token_id, *self.eos_ids)
        self.likely_ends = [token for token in likely if token in self.eos_ids]
        self.context: int | None = settings.target.shape.max_position
        self.vocab_size = settings.target.shape.vocab_size
        # The weights are at the server: only their configuration is known here.
        self.identity: dict[str, dict[str, str]] = {"target": {"config": config_hash(settings.target.config)}}

    def limit(self, row: dict[str, Any]) -> int:
        """Return the most response tokens that fit behind this prompt."""
        most = self.settings.max_new_tokens
        return most if self.context is None else min(most, self.context - len(row["prompt_ids"]))

    def request(self, number: int, row: dict[str, Any], turn: int = 1) -> tuple[str, dict[str, Any]]:
        """Build endpoint and body of the request for one turn of conversation `number`."""
        params = self.params
        body = {"model": self.model, "seed": self.settings.row_seed(number, turn), "max_tokens": self.limit(row)}
        body |= {"temperature": params.temperature, "top_p": params.top_p}
        body |= {"prompt": row["prompt_ids"], "top_k": params.top_k or -1, "return_token_ids": True}
        # The model's generation config may set another penalty.
        body |= {"repetition_penalty": 1.0, "ignore_eos": self.settings.ignore_eos}
        # Of a server that has another generation config, or that does not know what the template ends a turn with.
        body |= {} if self.settings.ignore_eos else {"stop_token_ids": list(self.eos_ids)}
        return "completions", body

    def read(self, number: int, row: dict[str, Any], reply: Any) -> TargetTurn:
        """Check a reply to prompt `number` and return the response.

        Raises:
            RowError: another shape, tokens outside the vocabulary or too many, or parts that contradict each other.
            InputError: another model replied, so that no reply is usable.
        """
        for wrong, expected in misfits(reply, REPLY):
            raise RowError(f"a reply with {wrong}, expected {expected}; check --server and --engine")
        if not reply["choices"] or reply["choices"][0]["finish_reason"] not in ("stop", "length"):
            found = json.dumps(reply["choices"])[:SHOWN_CHARS]
            raise RowError(f"choices {found}, expected finish_reason stop or length")
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        check_model(reply, self.model)
        num_prompt, expected_prompt = usage.get("prompt_tokens"), len(row["prompt_ids"])
        is_other = choice.get("prompt_token_ids") not in (None, row["prompt_ids"])
        if is_other or num_prompt not in (None, expected_prompt):
            found = f"{num_prompt} tokens at the server{', other ones' if is_other else ''}"
            raise InputError(f"prompt {number}", found, f"{expected_prompt}, as here", "Serve the model of --target.")

        limit, count = self.limit(row), usage.get("completion_tokens")
        if count is not None and not 0 <= count <= limit:
            raise RowError(f"completion_tokens {count:,}, expected at most {limit:,}")
        ids = self._ids_of(choice.get("text"), choice.get("token_ids"), limit, count)
        # A server may leave the end token out of the ids: its count of tokens tells. vLLM and SGLang may name it.
        hidden = count is None or count > len(ids)
        if choice["finish_reason"] == "stop" and hidden and self.eos_ids and not (ids and ids[-1] in self.eos_ids):
            named = [end for end in self.eos_ids if end in (choice.get("stop_reason"), choice.get("matched_stop"))]
            ids = [*ids, [*named, *self.likely_ends][0]]
        if not ids or (self.context is not None and expected_prompt + len(ids) > self.context):
            raise RowError(f"{len(ids):,} tokens, expected one or more within the context")
        self.check_end(ids)
        ended = ids[-1] in self.eos_ids and not self.settings.ignore_eos
        return TargetTurn(ids, ended)

    def check_end(self, ids: Sequence[int]) -> None:
        """Raise RowError for tokens behind an end token of the target, where no in-process engine goes on."""
        if not self.settings.ignore_eos and (inner := [token for token in ids[:-1] if token in self.eos_ids]):
            stops = ", ".join(map(str, self.eos_ids))
            raise RowError(f"tokens behind the end token {inner[0]}, expected a server that stops at each of {stops}")

    def _ids_of(self, text: str | None, ids: list[int] | None, limit: int, count: int | None) -> list[int]:
        """Return the token ids of a reply, checked against its text and its count of tokens."""
        if ids is None:
            raise RowError("a reply without token ids, expected a vLLM or SGLang that obeys return_token_ids")
        check_sampled(ids, limit, self.vocab_size)
        if count is not None and count < len(ids):  # with the prompt in front, for example
            raise RowError(f"{len(ids):,} token ids with completion_tokens {count:,}, expected as many or fewer")
        # A server may leave out the text of an end token that is not special.
        own = [self.tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:-1])]
        if text and ids and squeezed(text) not in map(squeezed, own):
            raise RowError(f"the text {text[:40]!r} with token ids of {own[0][:40]!r}, expected one tokenizer at both")
        return ids


def squeezed(text: str) -> str:
    """Remove what two decoders of the same ids may write otherwise: blanks, and halves of characters."""
    return "".join(text.replace("\ufffd", "").split())


def check_sampled(ids: Sequence[int], limit: int, vocab_size: int) -> None:
    """Raise RowError for more than `limit` token ids, or ids outside the vocabulary."""
    if len(ids) > limit:
        raise RowError(f"{len(ids):,} token ids where at most {limit:,} were asked for")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RowError(f"token id {token}, expected whole numbers below {vocab_size:,}")


class ServerShards:
    """Context that fills shards of responses, with requests for the next shard where this one leaves room.

    output: directory of the stage.
    """

    def __init__(
        self, engine: ServerEngine, prompts: Rows, begin: BeginConversation, output: Path, rows_per_shard: int
    ):
        self._engine, self._prompts, self._begin = engine, prompts, begin
        self._output, self._rows_per_shard = output, rows_per_shard
        # Conversations of the shards with requests in flight, by the shard's number.
        self._tasks: dict[int, list[asyncio.Task[Conversation | None]]] = {}

    def __enter__(self) -> ServerShards:
        self._runner = asyncio.Runner()
        self._slots = asyncio.Semaphore(self._engine.server.concurrency)
        return self

    def __exit__(self, *error: object) -> None:
        async def close() -> None:
            tasks = [task for shard_tasks in self._tasks.values() for task in shard_tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._engine.connection.close()

        with self._runner:
            self._runner.run(close())

    def answer_shard(self, shard: Shard, advance: Advance) -> ShardContent:
        """Generate the responses of one shard."""
        self._start(shard, advance)
        # Requests of this rank's next unfinished shard fill the slots that this one leaves free.
        size, total, world = self._rows_per_shard, len(self._prompts), place().world
        for index in range(shard.index + world, -(-total // size), world):
            following = Shard(index, index * size, min((index + 1) * size, total))
            if read_done(self._output, following) is None:
                self._start(following, advance)
                break

        async def wait() -> list[Conversation | None]:
            return await asyncio.gather(*self._tasks[shard.index])

        conversations = self._runner.run(wait())
        del self._tasks[shard.index]
        finished = [conversation for conversation in conversations if conversation is not None]
        content = shard_content(finished)
        return replace(content, counts={**content.counts, "failed_dropped": len(conversations) - len(finished)})

    def _start(self, shard: Shard, advance: Advance) -> None:
        """Start the conversations of a shard, if they are not yet."""
        if shard.index in self._tasks:
            return
        rows = self._prompts.read(shard.start, shard.stop)
        for number, row in enumerate(rows, shard.start):
            check_context(number, len(row["prompt_ids"]), self._engine.context)
        loop, failures = self._runner.get_loop(), list[str]()
        self._tasks[shard.index] = [
            loop.create_task(self._converse(number, row, failures, advance))
            for number, row in enumerate(rows, shard.start)
        ]

    async def _converse(
        self, number: int, prompt: dict[str, Any], failures: list[str], advance: Advance
    ) -> Conversation | None:
        """Generate one conversation; None if a turn has no usable reply. failures: of the shard.

        It keeps its slot, so that later turns do not wait for others to begin.
        """
        engine, conversation = self._engine, self._begin(prompt)
        async with self._slots:
            while conversation.prompt is not None:
                row = conversation.to_prompt_row()
                try:
                    reply = await engine.connection.ask(*engine.request(number, row, conversation.turn))
                    conversation.add_answer(engine.read(number, row, reply))
                except RowError as error:
                    failures.append(f"prompt {number} (id {prompt['id']}): {error}")
                    if len(failures) > engine.server.max_failed:
                        found = f"no usable answer to {len(failures)} prompts of a shard: {'; '.join(failures[-3:])}"
                        expected = f"at most {engine.server.max_failed} without one (--max-failed)"
                        remedy = "Run the same command again, or raise --max-failed."
                        raise InputError("server", found, expected, remedy) from error
                    advance(1)
                    return None
        advance(1)
        return conversation

"""Shards of responses from a server, which always has as many requests as it is to have: as soon as there is room for
the next shard's rows, they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from draftsmith.data.console import Advance, log_note
from draftsmith.data.engines.server import GaveUp, ServerEngine
from draftsmith.data.engines.server_answer import BadAnswer, named_failures
from draftsmith.data.ranks import place
from draftsmith.data.store.files import write_json
from draftsmith.data.store.reading import read_object
from draftsmith.data.store.shards import DONE, Rows, Shard, ShardContent, read_done
from draftsmith.data.text.template import check_context
from draftsmith.data.text.turns import Talk, Talks, shard_content
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    pass

SILENT_S = 30.0
ROW = {"id": str, "input_ids": [int], "prompt_length": int, "loss_mask": [bool], "turn": int, "ended": bool}


@dataclass
class _Asked:
    """A shard that is being answered. rows, answers, failures: by number; what was asked, what `Talk.held` says of each
    conversation, and why there is none."""

    rows: dict[int, dict[str, Any]]
    kept: Path
    answers: dict[int, dict[str, Any]]
    failures: dict[int, str] = field(default_factory=dict)
    tasks: Sequence[asyncio.Task[None]] = ()


class ServerShards:
    """A context; what was answered of shards that are not complete when it ends is kept for the next start.

    output: of the stage. rows_per_shard: as of the stage.
    """

    def __init__(self, engine: ServerEngine, prompts: Rows, talks: Talks, output: Path, rows_per_shard: int):
        self._engine, self._prompts, self._talks = engine, prompts, talks
        self._output, self._size = output, rows_per_shard
        self._asked: dict[int, _Asked] = {}  # by shard
        self._failed: dict[str, int] = {}  # prompts without an answer, by the record of a shard that was made here
        self._over = False  # nothing more is to be asked
        self._heard = False  # a reply, lately

    def __enter__(self) -> ServerShards:
        import httpx

        server, key = self._engine.server, self._engine.key
        self._runner = asyncio.Runner()
        self._room = asyncio.Semaphore(server.concurrency)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=server.timeout_s,
            limits=httpx.Limits(max_connections=server.concurrency),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for asked in self._asked.values():
            write_json(asked.kept, asked.answers)
        with self._runner:
            self._runner.run(self._end())

    async def _end(self) -> None:
        tasks = [task for asked in self._asked.values() for task in asked.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def make(self, shard: Shard, advance: Advance) -> ShardContent:
        """The answers to a shard of the prompts.

        Raises:
            InputError: prompts without an answer, more than `max_failed`; nothing can be had from this server.
        """
        for one in (shard, *self._behind(shard)):
            if one.index not in self._asked:
                self._begin(one, advance)
        asked = self._asked[shard.index]
        self._runner.run(self._all(asked.tasks))
        self._check_failures(asked)
        self._failed[f"{shard.name}.done.json"] = len(asked.failures)
        del self._asked[shard.index]
        asked.kept.unlink(missing_ok=True)
        made = shard_content([asked.answers[number] for number in asked.rows if number in asked.answers])
        return replace(made, counts={**made.counts, "failed_dropped": len(asked.failures)})

    async def _all(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the tasks, and say so every SILENT_S in which the server has answered nothing."""
        together, server = asyncio.gather(*tasks), self._engine.server
        self._heard = False
        while not (await asyncio.wait([together], timeout=SILENT_S))[0]:
            if not (self._heard or place().rank):
                limits = f"each is given up after {server.retries + 1} attempts of {server.timeout_s:g} s"
                failed = f"; the last failure: {self._engine.last_failure}" if self._engine.last_failure else ""
                log_note(f"draftsmith: {server.url}: no answer for {SILENT_S:g} s; {limits}{failed}")
            self._heard = False
        await together

    def _behind(self, shard: Shard) -> list[Shard]:
        """The shard that this rank makes next, if there is one."""
        index, total = shard.index, len(self._prompts)
        while (start := (index := index + place().world) * self._size) < total:
            following = Shard(index, start, min(start + self._size, total))
            if read_done(self._output, following) is None:
                return [following]
        return []

    def _begin(self, shard: Shard, advance: Advance) -> None:
        engine = self._engine
        rows = dict(enumerate(self._prompts.read(shard.start, shard.stop), shard.start))
        if engine.context is not None:
            for number, row in rows.items():
                check_context(number, len(row["prompt_ids"]), engine.context)
        kept = self._output / f"{shard.name}.answers.json"
        asked = self._asked[shard.index] = _Asked(rows, kept, _answers_before(kept, rows))
        advance(len(asked.answers))
        talks = {number: self._talks(row) for number, row in rows.items() if number not in asked.answers}
        loop = self._runner.get_loop()
        asked.tasks = [loop.create_task(self._hold(asked, *one, advance)) for one in talks.items()]

    async def _hold(self, asked: _Asked, number: int, talk: Talk, advance: Advance) -> None:
        """One conversation. Its later turns do not wait behind those that have not begun."""
        engine = self._engine
        async with self._room:
            while talk.prompt is not None:
                if self._over:
                    return
                try:
                    reply = await engine.ask(self._client, engine.request(number, talk.asked(), talk.turn))
                    self._heard = True
                    talk.hear(engine.read(number, talk.asked(), reply))
                except BadAnswer as error:
                    asked.failures[number] = str(error)
                    failed = sum(len(one.failures) for one in self._asked.values())
                    self._over |= isinstance(error, GaveUp) and failed > self._allowed()
                    break
                except InputError:  # concerns them all
                    self._over = True
                    raise
            else:
                asked.answers[number] = talk.held()
        advance(1)

    def _allowed(self) -> int:
        """Prompts that shards which are not complete may lack. The last one that was made may not be written yet."""
        others = (path for path in self._output.glob("shard-*.done.json") if path.name not in self._failed)
        failed = sum(read_object(path, DONE)["counts"].get("failed_dropped", 0) for path in others)
        return self._engine.server.max_failed - failed - sum(self._failed.values())

    def _check_failures(self, asked: _Asked) -> None:
        failures, most = asked.failures, self._engine.server.max_failed
        if len(failures) > self._allowed():
            named = [
                (f"prompt {number} (id {asked.rows[number]['id']})", why) for number, why in sorted(failures.items())
            ]
            found = f"no usable answer to {len(failures)} of {len(asked.rows)} prompts: {named_failures(named)}"
            expected = f"at most {most} without one (--server.max-failed)"
            remedy = "Run the same command again, which asks for these only, or raise --server.max-failed."
            raise InputError("server", found, expected, remedy)


def _answers_before(path: Path, rows: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What an earlier start was answered in a shard that it did not finish."""
    if not path.exists():
        return {}
    held = read_object(path, {"*": {"rows": [ROW], "counts": {"*": int}}})
    return {number: held[str(number)] for number in rows if str(number) in held}

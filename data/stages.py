"""Options of the stages, the commands `draftsmith data ...`: in a file that loads no model, as --help reads it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from draftsmith.data.settings import (
    FeatureDtype,
    RemoteCode,
    Sampling,
    StageTarget,
    check_left_out,
    comma_numbers,
    volatile,
)
from draftsmith.modules.drafters import learned
from draftsmith.modules.types import InputError, SamplingParams, check_range, check_ranges

Turns = Literal["all", "first", "last", "each"]
ANSWER_S = 600.0  # longest wait for a server's answer
SELF = "self"  # the source of prompts that the target writes


@dataclass(frozen=True)
class PromptsConfig(RemoteCode):
    """Options of `data prompts`: which prompts, for which target.

    Attributes:
        source: A .jsonl, .json or .parquet file, a directory or hub id of `datasets`, embedded:prompts, or one of
            sharegpt, ultrachat, perfectblend, magpie, gsm8k (from the hub); several are separated by commas. Rows are
            ShareGPT conversations, OpenAI messages, logged requests (and responses), FastChat turns, Alpaca columns, or
            prompt (and answer). Without prompts: self gives beginnings of user turns, for `data responses` to finish,
            and the output of that gives the prompts.
        target: Directory or hub id of the target model, or embedded:target; its tokenizer and context length are used.
        output: Directory to write.
        columns: Names of the source's columns if they are not the usual ones: prompt=question,answer=reply,id=key; also
            of messages, task, split, system, history, tools and chat_template_kwargs.
        split: Only this split: of a `datasets` source, or by the rows' column `split`. A slice
            such as train[:1%] or train[100:200] is one of a split, or of a file, which is `train`.
        tasks: Only rows whose column `task` (or `category`) has this value, or one of several separated by commas.
        where: NAME=VALUE[,VALUE]: only rows whose column has this value, or one of several; repeated for more columns.
        keep: Columns that prompts and their answers keep for `eval bench --by`, separated by commas: of a row, its
            metadata, or the request and response that it logs. Dots lead into objects (request.headers.x-route). A
            `language` that rows lack is detected, with the extra `languages`.
        limit: Only the first so many rows that pass the filters; 0 takes all.
        subset: Configuration name of a `datasets` source.
        turns: Turns that the target answers: all of the user's, each after its own answers to those before; the first;
            the last, or each by itself, after the source's answers and results of tools. A chat with results of tools
            has no all: each of its turns is answered by itself.
        length: Lengths of prompts, such as 1k,4k,16k (1k is 1,024 tokens), each the task of its prompts. They are cut
            from rows that are as long: conversations end at an earlier question, long messages are shortened in the
            middle. Shorter rows are dropped and counted.
        supervised: Keep the source's answers: input_ids of whole conversations, and a loss mask on the assistant's
            tokens of all turns, except answers of weight 0. With --turns each every answer has a row by itself, with
            last only the last one has.
        chat_template: File with a Jinja chat template to use instead of the tokenizer's own; none for a model that
            continues plain text.
        max_length: Longest prompt (supervised: conversation) in tokens, for later turns with the answers before them;
            0 is the target's context.
        overlong: Longer ones are an error, or dropped and counted.
        invalid: Rows that cannot be used (no user turn, no text) are an error, or dropped and counted.
        rows_per_shard: Rows of the source per shard.
    """

    source: str = volatile()
    target: str = volatile()
    output: Path = volatile()
    columns: str = ""
    split: str | None = None
    tasks: str | None = None
    where: tuple[str, ...] | None = None
    keep: str | None = None
    limit: int = 0
    subset: str | None = None
    turns: Turns = "all"
    length: str | None = None
    supervised: bool = False
    chat_template: Path | None = volatile(None)
    max_length: int = 0
    overlong: Literal["error", "drop"] = "error"
    invalid: Literal["error", "drop"] = "error"
    rows_per_shard: int = 4096
    trust_remote_code: bool = volatile(False, kw_only=True)

    def __post_init__(self) -> None:
        check_ranges(self, rows_per_shard=1, limit=0, max_length=0)
        if self.supervised and self.turns == "first":
            expected = "all, each or last with --supervised, which keeps recorded answers"
            raise InputError("turns", self.turns, expected, "Leave --turns or --supervised out.")
        if self.length is not None:
            check_left_out(self, ("turns", "supervised"), "with --length", "none: a prompt ends where its row does")
            if self.source == SELF:
                raise InputError("length", f"{self.length} with --source {SELF}", "rows that are long", "Leave it out.")
            check_range("length", self.lengths[0], 1)
        if self.supervised and self.source == SELF:
            raise InputError("source", f"{SELF} with --supervised", "prompts with answers", "Leave --supervised out.")
        if self.source == SELF:
            check_left_out(self, ("where", "keep"), f"with --source {SELF}", "none: its rows have no columns")
        _ = self.filters

    @property
    def kept(self) -> list[str]:
        """Names of the columns to keep."""
        return [name.strip() for name in (self.keep or "").split(",") if name.strip()]

    @property
    def filters(self) -> dict[str, str]:
        """Columns with the values that rows may have, separated by commas."""
        filters, name = dict[str, str](), ""
        # The command line splits a list at its commas.
        for text in ",".join(self.where or ()).split(",") if self.where else ():
            before, sign, value = text.partition("=")
            name, value = (before.strip(), value) if sign else (name, text)
            if not name or not value.strip():
                raise InputError("where", text, "NAME=VALUE[,VALUE]", "For example --where language=de,da.")
            filters[name] = f"{filters[name]},{value}" if name in filters else value
        return filters

    @property
    def lengths(self) -> list[int]:
        """Lengths of prompts, ascending; empty if prompts are taken as they are."""
        return [] if self.length is None else sorted(comma_numbers("length", self.length, number_of_tokens))


def number_of_tokens(text: str) -> int:
    """Parse a number of tokens, in which k stands for 1,024."""
    return 1024 * int(text[:-1]) if text[-1:].lower() == "k" else int(text)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """A running server that answers.

    Attributes:
        server: Its address, such as http://127.0.0.1:8000, with a path where that is not /v1.
        server_model: Name of the model at the server; default: the value of `target`.
        concurrency: Requests in flight at once.
        timeout_s: Longest wait for one whole reply, in seconds.
        max_failed: Prompts per shard that may fail; they are dropped and counted. With more failures the stage ends,
            and the same command continues with this shard.
        api_key_env: Environment variable that holds the API key.
    """

    help_group: ClassVar[str] = "Server"
    help_rarely: ClassVar[tuple[str, ...]] = ("timeout_s", "max_failed", "api_key_env")

    server: str = volatile("http://127.0.0.1:8000")
    server_model: str | None = volatile(None)
    concurrency: int = volatile(32)
    timeout_s: float = volatile(ANSWER_S)
    max_failed: int = volatile(0)
    api_key_env: str = volatile("OPENAI_API_KEY")

    def __post_init__(self) -> None:
        check_ranges(self, concurrency=1, max_failed=0)
        if not 0 < self.timeout_s < math.inf:
            raise InputError("timeout_s", self.timeout_s, "a positive number of seconds", "Correct it.")
        # An address with a password or a key is neither shown nor stored in a manifest.
        if {"@", "?", "#"} & set(self.server):
            remedy = "Set the environment variable that --api-key-env names."
            raise InputError("server", "an address with @, ? or #", "no user, password or query", remedy)
        try:
            address = urlsplit(self.server)
            known = address.scheme in ("http", "https") and address.hostname and address.port != 0
        except ValueError:  # a port that is none, or half of an IPv6 address
            known = False
        if not known:
            raise InputError("server", repr(self.server), "http://HOST:PORT, or https", "Correct it.")


@dataclass(frozen=True)
class ResponsesConfig(ServerConfig, Sampling, StageTarget):
    """Options of `data responses`: how the target answers.

    Attributes:
        data: Directory that `data prompts` wrote.
        target: Directory or hub id of the target model, or embedded:target.
        output: Directory to write.
        engine: own: in process, with our own batching. openai: a running server whose completions take token ids, as
            those of vLLM and SGLang. llamacpp: a running llama-server.
        max_new_tokens: Longest answer, in tokens. A cut answer is the last of its conversation.
        ignore_eos: Continue behind end tokens up to max_new_tokens, for prompts whose answers are too short to learn
            from. Then only the first turn of a conversation is answered.
        seed: Seed of the sampling. Each row has random numbers of its own, whatever shares its batch.
        limit: Only the first so many prompts; 0 takes all.
        batch_size: Prompts answered together. A finished one makes room for the next. A target that transformers runs
            (--loader hf) answers one after the other.
        rows_per_shard: Prompts per shard; what a killed run loses at most.
        chat_template: File with the template that the prompts were made with, for later turns, if it is neither the
            tokenizer's own nor still at its former path.
    """

    data: Path = volatile()
    target: str = volatile()
    output: Path = volatile()
    engine: Literal["own", "openai", "llamacpp"] = "own"
    temperature: float = field(default=1.0, kw_only=True)
    max_new_tokens: int = 256
    ignore_eos: bool = False
    seed: int = 0
    limit: int = 0
    batch_size: int = 32
    rows_per_shard: int = 256
    chat_template: Path | None = volatile(None)

    @property
    def runs_here(self) -> bool:
        return self.engine == "own"

    def __post_init__(self) -> None:
        check_ranges(self, max_new_tokens=1, batch_size=1, rows_per_shard=1, limit=0, num_threads=0)
        ServerConfig.__post_init__(self)
        if self.engine == "own":
            names = [field.name for field in dataclasses.fields(ServerConfig)]
            check_left_out(self, names, "with --engine own", "--engine openai or llamacpp, which asks a server")
        # Check the sampling settings before anything is loaded.
        _ = self.sampling


@dataclass(frozen=True)
class AcceptanceConfig(StageTarget):
    """Options of `data acceptance`: the pair to label, and how it decodes.

    Attributes:
        data: Directory that `data responses` wrote with this target.
        target: Directory or hub id of the target model, or embedded:target.
        output: Directory to write.
        head: Directory or hub id of the draft model, or embedded:draft: one drafted token is labeled at every position
            of the answer (SpecDec++). Or directory of a trained drafter's head: whole drafts, as the decoder makes
            them, from some of the positions.
        temperature: Temperature of target and draft; 0 is greedy, where P is agreement. Default: that of the responses.
        top_k: Sample among the k most probable tokens; 0 is all. Default: that of the responses.
        top_p: Sample among the most probable tokens that hold this probability; 1 is all. Default: as top_k.
        depth: Of a head: tokens per draft.
        stride: Of a head: tokens of the answer from one draft's start to the next.
        seed: Seed of the drafted tokens; each row has random numbers of its own.
        limit: Only the first so many responses; 0 takes all.
        batch_size: Of a draft model: responses read together.
        rows_per_shard: Responses per shard; what a killed run loses at most.
    """

    data: Path = volatile()
    target: str = volatile()
    output: Path = volatile()
    head: str = volatile()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    depth: int = 10
    stride: int = 4
    seed: int = 0
    limit: int = 0
    batch_size: int = 8
    rows_per_shard: int = 256

    def __post_init__(self) -> None:
        check_ranges(self, batch_size=1, rows_per_shard=1, depth=1, stride=1, limit=0, num_threads=0)
        # Check them: only those of the responses are not known yet.
        _ = self.sampling({})

    def sampling(self, sampled: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling settings; defaults are those of the responses, `sampled`."""
        top_k = sampled.get("top_k", 0) if self.top_k is None else self.top_k
        top_p = sampled.get("top_p", 1.0) if self.top_p is None else self.top_p
        temperature = sampled.get("temperature", 0.0) if self.temperature is None else self.temperature
        return SamplingParams(temperature, top_k, top_p)


@dataclass(frozen=True)
class FeaturesConfig(StageTarget):
    """Options of `data features`: which text the target reads.

    Attributes:
        data: Directory that `data responses` wrote with this target, or `data prompts --supervised`.
        target: Directory or hub id of the target model, or embedded:target.
        output: Directory to write.
        drafter: Kind of the drafter to train, as `train` names it, if it reads other states than those after the final
            norm.
        layers: Layers that the drafter reads. Default: its own choice for this target.
        limit: Only the first so many rows; 0 takes all.
        tokens_per_batch: Tokens read together, padding included; a longer row is read alone.
        rows_per_shard: Rows per shard; the features of four shards are in memory at once.
        feature_dtype: Stored type: bf16, or fp8 with a scale per token, half the bytes.
        server: Address of a vLLM server that `draftsmith launch vllm` has started, for targets of any size.
    """

    data: Path = volatile()
    target: str = volatile()
    output: Path = volatile()
    drafter: str | None = volatile(None)
    layers: tuple[int, ...] = volatile(())
    limit: int = 0
    tokens_per_batch: int = 8192
    rows_per_shard: int = 128
    feature_dtype: FeatureDtype = "bf16"
    server: str | None = volatile(None, presence=True)

    @property
    def runs_here(self) -> bool:
        return self.server is None

    def __post_init__(self) -> None:
        check_ranges(self, tokens_per_batch=1, rows_per_shard=1, limit=0, num_threads=0)
        check_drafter(self.drafter)
        if self.server is not None:
            check_left_out(self, ["loader"], "with --server", "none: the server runs the target")


@dataclass(frozen=True)
class InspectConfig:
    """Options of `data inspect`: which rows to show.

    Attributes:
        data: Directory of prompts, responses, acceptance labels, rollouts or features.
        row: Number of the first row to show.
        rows: How many rows to show; 0 shows the summary only.
    """

    data: Path = volatile()
    row: int = 0
    rows: int = 1

    def __post_init__(self) -> None:
        check_ranges(self, row=0, rows=0)


def check_drafter(kind: str | None) -> None:
    """Raise InputError for a kind of drafter that is not trained here."""
    if kind is not None and kind not in learned():
        raise InputError("drafter", kind, " or ".join(learned()), "Correct it, or leave it out.")

"""Stage `data responses`: the target answers the prompts, turn by turn.

Responses are stored as the token ids that it sampled, not as text.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from draftsmith.data.console import Advance, log_note, print_text
from draftsmith.data.engines.llamacpp import LlamaCppEngine, llamacpp_server
from draftsmith.data.engines.openai import ServerEngine, ServerShards
from draftsmith.data.engines.own import ResponseDrafter, RowUniforms, generate_rows, set_threads
from draftsmith.data.engines.server import ServerConfig
from draftsmith.data.engines.vllm import VllmEngine
from draftsmith.data.settings import Dtype, RemoteCode, Sampling, check_not_negative, check_positive
from draftsmith.data.store.datasets import answer_lengths
from draftsmith.data.store.manifest import Field, Manifest, open_artifact, volatile
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import Shard, ShardContent, StagePlan, run_stage
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.text.answers import Supervision
from draftsmith.data.text.template import check_context, context_length
from draftsmith.data.text.turns import (
    AnswerSettings,
    BeginConversation,
    Conversation,
    PendingTurn,
    TargetTurn,
    shard_content,
    turns_tokenizer,
)
from draftsmith.modules.finite import name_nonfinite
from draftsmith.modules.pretrained.models import load_lm, pick_device, vocabulary_size
from draftsmith.modules.pretrained.ranks import place
from draftsmith.modules.pretrained.tokenizers import text_identity
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

# Fields of a text with answers, shared by responses and their labels.
TEXT_FIELDS = (
    Field("id", "string"),
    Field("input_ids", "list<int32>", ("T",)),
    Field("loss_mask", "list<bool>", ("T",)),
    Field("turn", "int32"),
)
FIELDS = (
    *TEXT_FIELDS,
    Field("ended", "bool"),
    Field("retokenized", "bool"),
    Field("task", "string"),
    Field("text", "string"),
    Field("server_tokens", "int32"),
)


@dataclass(frozen=True)
class ResponsesConfig(Sampling, RemoteCode):
    """Options of `data responses`: how the target answers.

    Attributes:
        prompts: Directory that `data prompts` wrote.
        target: Directory or hub id of the target model, or embedded:target.
        output: Directory to write.
        engine: transformers: in process, with our own batching. vllm: in process, with vLLM's. llamacpp: by
            llama.cpp's server, which is started with the target's GGUF file and answers `batch_size` prompts at a time.
            openai: through a running server, OpenAI-compatible or llama.cpp's.
        max_new_tokens: Longest answer, in tokens. A cut answer is the last of its conversation.
        ignore_eos: Continue behind end tokens up to max_new_tokens, for prompts whose answers are too short to learn
            from. Then only the first turn of a conversation is answered.
        seed: Seed of the sampling. Each row has random numbers of its own, whatever shares its batch.
        limit: Only the first so many prompts; 0 takes all.
        batch_size: Prompts answered together. A finished one makes room for the next.
        rows_per_shard: Prompts per shard; what a killed run loses at most.
        dtype: Type of the weights: float32, bfloat16, float16, or auto for the checkpoint's own.
        draft: Draft model or directory of a trained head, in process. Responses have the target's distribution with
            any drafter.
        method: Drafting method, name:setting=value as in `draftsmith eval bench`; pld needs no --draft. Default: chains
            of the draft. Greedy, and with methods that choose nodes (pld, lookahead, trees), responses equal those
            without a drafter to the token.
        lm_engine: How the model runs in process: lean for Llama-family weights, hf for any transformers model.
        device: cpu, cuda:0, ... ; auto takes this rank's GPU where there is one.
        num_threads: CPU threads; 0 is torch's own choice.
        chat_template: File with the template that the prompts were made with, for later turns, if it is neither the
            tokenizer's own nor still at its former path.
        vllm_args: JSON file of further arguments of vllm.LLM, for engine vllm: {"tensor_parallel_size": 8,
            "speculative_config": {...}}.
        server: Where and how to ask, for engine openai.
        engine_path: llama-server, for engine llamacpp. Default: that of `make engines` in this directory, or one on the
            PATH.
    """

    prompts: Path = volatile()
    target: str = volatile()
    output: Path = volatile()
    engine: Literal["transformers", "vllm", "llamacpp", "openai"] = "transformers"
    temperature: float = field(default=1.0, kw_only=True)
    max_new_tokens: int = 256
    ignore_eos: bool = False
    seed: int = 0
    limit: int = 0
    batch_size: int = 32
    rows_per_shard: int = 256
    dtype: Dtype = "float32"
    # Its content is compared by hash.
    draft: str | None = volatile(None)
    method: str | None = None
    lm_engine: Literal["auto", "lean", "hf"] = "auto"
    device: str = volatile("auto")
    num_threads: int = volatile(0)
    trust_remote_code: bool = volatile(False, kw_only=True)
    chat_template: Path | None = volatile(None)
    # Its content is compared.
    vllm_args: Path | None = volatile(None)
    server: ServerConfig = field(default_factory=ServerConfig)
    engine_path: Path | None = volatile(None)

    def __post_init__(self) -> None:
        check_positive(self, "max_new_tokens", "batch_size", "rows_per_shard")
        check_not_negative(self, "limit", "num_threads")
        if self.engine != "transformers" and (self.draft or self.method):
            vllm = "Pass a speculative_config in --vllm-args"
            remedy = {"openai": "Let the server draft", "vllm": vllm}.get(self.engine, "Choose one")
            found = f"a drafter with --engine {self.engine}"
            raise InputError("draft", found, "one with --engine transformers", f"{remedy}, and no --draft or --method.")
        if self.engine != "vllm" and self.vllm_args is not None:
            raise InputError("vllm_args", f"with --engine {self.engine}", "--engine vllm", "Leave them out.")
        # Check the sampling settings before anything is loaded.
        _ = self.sampling


# Between two reports of progress.
ADVANCE_EVERY_S = 1.0
# Turns -> (number in them, answer) of each, in the order of completion.
GenerateTurns = Callable[[Sequence[PendingTurn]], Iterable[tuple[int, TargetTurn]]]
MakeShard = Callable[[Shard, Advance], ShardContent]


@sole_writer(shared=True)
def run(config: ResponsesConfig) -> Path:
    """Write the artifact `responses` and return its directory."""
    set_threads(config.num_threads)
    manifest = open_artifact(config.prompts, "prompts", text_identity(config.target))
    prompts = Rows(config.prompts, manifest, limit=config.limit, vocab_size=vocabulary_size(config.target))
    with open_engine(config, manifest, prompts) as (make_shard, identity):
        plan = StagePlan(
            kind="responses",
            stage="data responses",
            config=config,
            num_rows=len(prompts),
            fields=FIELDS,
            inputs={"prompts": manifest.digest},
            identity={**manifest.identity, **identity},
            sampling={"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p},
            seed=config.seed,
        )
        responses = run_stage(plan, make_shard)

    # Print how much there is to learn from the responses, and warn if it is little.
    if place().rank == 0:
        masks = Rows(config.output, responses, ["loss_mask"]).table()["loss_mask"]
        supervision = Supervision.of(answer_lengths(masks)[0])
        print_text(f"responses: {supervision.text()}")
        if warning := supervision.warning():
            log_note(warning)
    return config.output


@contextmanager
def open_engine(
    config: ResponsesConfig, manifest: Manifest, prompts: Rows
) -> Iterator[tuple[MakeShard, Mapping[str, Any]]]:
    """Open the engine that `config.engine` names. manifest: of the prompts.

    Yields what makes a shard, and the identity of the target and of what else decides the responses.
    """
    tokenizer = None
    if manifest.counts.get("later_turns"):
        tokenizer = turns_tokenizer(config.target, manifest, config.chat_template)

    def conversations(context: int | None) -> BeginConversation:
        # Later turns keep the length that the first ones were limited to.
        bounds = [bound for bound in (manifest.config.get("max_length"), context) if bound]
        return lambda row: Conversation(row, tokenizer, min(bounds, default=None))

    def in_process(generate: GenerateTurns, context: int) -> MakeShard:
        return functools.partial(answer_shard, generate, prompts, conversations(context), context)

    settings = AnswerSettings(config.target, config.sampling, config.max_new_tokens, config.ignore_eos, config.seed)
    if config.engine == "openai":
        if config.server.dialect == "llamacpp":
            server: ServerEngine = LlamaCppEngine(config.server, settings)
        else:
            server = ServerEngine(config.server, settings, manifest.identity["chat_template"])
        begin = conversations(server.context)
        with ServerShards(server, prompts, begin, config.output, config.rows_per_shard) as shards:
            yield shards.make, {"target": server.identity, **server.answered_by}
    elif config.engine == "llamacpp":
        # Every slot has room for the longest conversation.
        room = max(len(row["prompt_ids"]) for row in prompts.iterate()) + config.max_new_tokens + 1
        if manifest.counts.get("later_turns"):
            room = manifest.config.get("max_length") or context_length(config.target) or room
        slots, begin = min(config.batch_size, len(prompts)), conversations(room)
        with (
            llamacpp_server(settings, config.engine_path, slots, room, config.num_threads) as llamacpp,
            ServerShards(llamacpp, prompts, begin, config.output, config.rows_per_shard) as shards,
        ):
            yield shards.make, {"target": llamacpp.identity, **llamacpp.answered_by}
    elif config.engine == "vllm":
        with VllmEngine(settings, config.dtype, config.vllm_args, config.trust_remote_code) as vllm:
            identity = {"target": vllm.identity, "answered_by": vllm.answered_by}
            yield in_process(vllm.answers, vllm.context), identity
    else:
        # The weights are packed, as decoding reads them.
        how = (config.dtype, pick_device(config.device), config.lm_engine, config.trust_remote_code, True)
        lm = load_lm(config.target, *how)
        drafter = ResponseDrafter.load(lm, config.target, config.draft, config.method, lambda path: load_lm(path, *how))
        generate = functools.partial(generate_turns, lm, config, drafter)
        yield in_process(generate, lm.info.max_position), {"target": lm.info.identity, **drafter.identity}


def generate_turns(
    lm: CausalLM, config: ResponsesConfig, drafter: ResponseDrafter, turns: Sequence[PendingTurn]
) -> Iterator[tuple[int, TargetTurn]]:
    """Answer turns with our own decoder, `batch_size` at a time."""
    ends = () if config.ignore_eos else lm.info.eos_ids
    # Turn 1 uses the same stream as a prompt without later turns.
    stages = ["responses" if turn.number == 1 else f"responses/turn-{turn.number}" for turn in turns]
    with name_nonfinite([turn.id for turn in turns]):
        answers = generate_rows(
            lm,
            [turn.prompt_ids for turn in turns],
            config.sampling,
            config.max_new_tokens,
            config.batch_size,
            lambda i: RowUniforms(stages[i], config.seed, turns[i].row),
            ends,
            lambda capacity: drafter.build(capacity, ends, config.batch_size),
        )
        for i, tokens in answers:
            yield i, TargetTurn(tokens, ended=tokens[-1] in ends)


def answer_shard(
    generate: GenerateTurns, prompts: Rows, begin: BeginConversation, context: int, shard: Shard, advance: Advance
) -> ShardContent:
    """Answer a shard in rounds: the first turns of all conversations, then the second ones, and so on."""
    # Batches hold rows of one shard only, and the drafter begins anew with each shard: the rows that share a batch, and
    # with them the last bits of the logits, do not depend on earlier shards or on the number of ranks.
    rows = prompts.read(shard.start, shard.stop)
    conversations, shares = [], {}
    for number, row in enumerate(rows, shard.start):
        check_context(number, len(row["prompt_ids"]), context)
        conversations.append((number, begin(row)))
        # Progress counts rows: a turn is a part of its row.
        shares[number] = 1 / (1 + len(json.loads(row["later"])))
    # A round asks every conversation that has a turn left.
    while waiting := [entry for entry in conversations if entry[1].prompt is not None]:
        turns = []
        for number, conversation in waiting:
            row = conversation.to_prompt_row()
            turns.append(PendingTurn(number, conversation.turn, row["id"], row["prompt_ids"]))
        # Answers come in the order of completion; vLLM's come all at once, and a rate in their midst would mislead.
        done, since = 0.0, math.inf
        for i, answer in generate(turns):
            number, conversation = waiting[i]
            conversation.add_answer(answer)
            done, now = done + shares[number], time.monotonic()
            since = min(since, now)
            if now - since > ADVANCE_EVERY_S:
                advance(done)
                done, since = 0.0, now
        advance(done)
    return shard_content([conversation.to_json() for _, conversation in conversations])

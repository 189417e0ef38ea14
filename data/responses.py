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
from pathlib import Path
from typing import Any

from draftsmith.data.console import Advance, log_note, print_text
from draftsmith.data.engines.llamacpp import LlamaCppEngine, llamacpp_server
from draftsmith.data.engines.openai import ServerEngine, ServerShards
from draftsmith.data.engines.own import ResponseDrafter, RowUniforms, generate_rows, set_threads
from draftsmith.data.engines.vllm import VllmEngine
from draftsmith.data.settings import ResponsesConfig
from draftsmith.data.store.datasets import answer_lengths
from draftsmith.data.store.manifest import Field, Manifest, open_artifact
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

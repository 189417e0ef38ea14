"""Stage `data responses`: the target answers the prompts, turn by turn.

Responses are stored as the token ids that it sampled, not as text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftsmith.data.console import Advance, log_note, print_text
from draftsmith.data.engines.llamacpp import LlamaCppEngine
from draftsmith.data.engines.openai import ServerEngine, ServerShards
from draftsmith.data.engines.own import OwnEngine, set_threads
from draftsmith.data.ranks import place
from draftsmith.data.stages import ResponsesConfig
from draftsmith.data.store.datasets import answer_lengths
from draftsmith.data.store.manifest import Field, Manifest, open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.store.shards import Shard, ShardContent, StagePlan, run_stage
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.text.answers import Supervision
from draftsmith.data.text.template import check_context
from draftsmith.data.text.turns import (
    AnswerSettings,
    BeginConversation,
    Conversation,
    PendingTurn,
    shard_content,
    turns_tokenizer,
)
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import load_lm

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
    Field("task", "string"),
    Field("labels", "string"),
)


def text_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a response that its labels and features repeat."""
    return {name: row[name] for name in ("id", "input_ids", "loss_mask", "turn", "task")}


@sole_writer(shared=True)
def run(config: ResponsesConfig) -> Path:
    """Write the artifact `responses` and return its directory."""
    set_threads(config.num_threads)
    config, target = config.open(config.target)
    made_with = target.text_identity(Manifest.read(config.data).identity)
    manifest = open_artifact(config.data, "prompts", made_with)
    prompts = Rows(manifest, limit=config.limit, vocab_size=target.shape.vocab_size)
    tokenizer = None
    if manifest.counts.get("later_turns"):
        tokenizer = turns_tokenizer(target, manifest, config.chat_template)
    with ExitStack() as stack:
        engine = open_engine(config, target, manifest)
        # Later turns keep the length that the first ones were limited to.
        bounds = [bound for bound in (manifest.config.get("max_length"), engine.context) if bound]

        def begin(row: Mapping[str, Any]) -> Conversation:
            return Conversation(row, tokenizer, min(bounds, default=None))

        answer: Callable[[Shard, Advance], ShardContent]
        if isinstance(engine, ServerEngine):
            shards = ServerShards(engine, prompts, begin, config.output, config.rows_per_shard)
            answer = stack.enter_context(shards).answer_shard
        else:
            answer = functools.partial(answer_shard, engine, prompts, begin)
        plan = StagePlan(
            kind="responses",
            stage="data responses",
            config=config,
            num_rows=len(prompts),
            fields=FIELDS,
            inputs={"prompts": manifest.digest},
            identity={**manifest.identity, **engine.identity},
            sampling={"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p},
            seed=config.seed,
        )
        responses = run_stage(plan, answer)

    # Print how much there is to learn from the responses, and warn if it is little.
    if place().rank == 0:
        masks = Rows(responses, ["loss_mask"]).table()["loss_mask"]
        supervision = Supervision.of(answer_lengths(masks)[0])
        print_text(f"responses: {supervision.text()}")
        if warning := supervision.warning():
            log_note(warning)
    return config.output


def open_engine(config: ResponsesConfig, target: Checkpoint, manifest: Manifest) -> OwnEngine | ServerEngine:
    """Open the engine that `config.engine` names. manifest: of the prompts."""
    settings = AnswerSettings(target, config.sampling, config.max_new_tokens, config.ignore_eos, config.seed)
    if config.engine == "openai":
        return ServerEngine(config, settings, manifest.identity["chat_template"])
    if config.engine == "llamacpp":
        return LlamaCppEngine(config, settings)
    # The weights are packed, as decoding reads them.
    lm = load_lm(settings.target, **config.loading, packed=True)
    return OwnEngine(settings, lm, config.batch_size)


def answer_shard(
    engine: OwnEngine, prompts: Rows, begin: BeginConversation, shard: Shard, advance: Advance
) -> ShardContent:
    """Answer a shard in rounds: the first turns of all conversations, then the second ones, and so on."""
    # Batches hold rows of one shard only, and the drafter begins anew with each shard: the rows that share a batch, and
    # with them the last bits of the logits, do not depend on earlier shards or on the number of ranks.
    rows = prompts.read(shard.start, shard.stop)
    conversations, shares = [], {}
    for number, row in enumerate(rows, shard.start):
        check_context(number, len(row["prompt_ids"]), engine.context)
        conversations.append((number, begin(row)))
        # Progress counts rows: a turn is a part of its row.
        shares[number] = 1 / (1 + len(json.loads(row["later"])))
    # A round asks every conversation that has a turn left.
    while waiting := [entry for entry in conversations if entry[1].prompt is not None]:
        turns = []
        for number, conversation in waiting:
            row = conversation.to_prompt_row()
            turns.append(PendingTurn(number, conversation.turn, row["id"], row["prompt_ids"]))
        # Answers come in the order of completion.
        for i, answer in engine.answers(turns):
            number, conversation = waiting[i]
            conversation.add_answer(answer)
            advance(shares[number])
    return shard_content([conversation for _, conversation in conversations])

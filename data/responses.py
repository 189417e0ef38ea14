"""Stage `data responses`: the target answers the prompts, turn by turn. What is stored is what it sampled: token ids,
not text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftsmith.data.console import Advance, log_note, print_text
from draftsmith.data.engines.openai import ServerConfig, ServerEngine, ServerShards
from draftsmith.data.engines.own import ResponseDrafter, RowSource, generate_rows, set_threads
from draftsmith.data.engines.vllm import VllmEngine
from draftsmith.data.models.loading import load_lm, name_nonfinite, pick_device, text_identity, vocabulary_size
from draftsmith.data.ranks import place
from draftsmith.data.settings import Dtype, RemoteCode, Sampling, check_not_negative, check_positive
from draftsmith.data.store.datasets import answer_lengths
from draftsmith.data.store.manifest import Field, Manifest, open_artefact, volatile
from draftsmith.data.store.rows import ListColumn, Rows
from draftsmith.data.store.shards import Shard, ShardContent, StagePlan, run_stage
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.text.answers import Supervision
from draftsmith.data.text.template import check_context
from draftsmith.data.text.turns import (
    AnswerSettings,
    Talk,
    Talks,
    TargetTurn,
    Turn,
    has_later_turns,
    shard_content,
    turns_tokenizer,
)
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import InputError

# Of a text with answers, and of what is made of it.
TEXT_FIELDS = (
    Field("id", "string"),
    Field("input_ids", "list<int32>", ("T",)),
    Field("loss_mask", "list<bool>", ("T",)),
    Field("turn", "int32"),
)
FIELDS = (
    *TEXT_FIELDS,
    Field("ended", "bool"),
    Field("retokenised", "bool"),
    Field("task", "string"),
    Field("text", "string"),
    Field("server_tokens", "int32"),
)


@dataclass(frozen=True)
class ResponsesConfig(Sampling, RemoteCode):
    """How the target answers.

    Attributes:
        prompts: Directory that `data prompts` wrote.
        target: Directory or hub id of the target model, or embedded:target.
        output: Directory to write.
        engine: In process with our own batching (transformers) or with vLLM's (vllm), or through an OpenAI-compatible
            server (openai).
        max_new_tokens: Longest answer, in tokens. One that it cuts is the last of its conversation.
        ignore_eos: Go on behind end tokens, up to max_new_tokens: for prompts whose own answers are too short to learn
            from. Of a conversation only the first turn is answered then.
        seed: Of the sampling. Each row has random numbers of its own, whatever shares its batch.
        limit: Only the first so many prompts; 0 takes all.
        batch_size: Prompts answered together. One that is done makes room for the next.
        rows_per_shard: Prompts in each shard; what a killed run loses at most.
        dtype: Type of the weights: float32, bfloat16, float16, or auto for the checkpoint's own.
        draft: What drafts the answers, in process: a draft model, or the directory of a trained head. What is sampled
            has the target's distribution whatever drafts.
        method: How to draft: name:setting=value, as in `draftsmith eval bench`; pld needs no --draft. Default: what
            --draft gives drafts chains of its method's length. Where nodes are chosen and not drawn (pld, lookahead,
            trees), and greedy, the answers are to the token those without a drafter.
        lm_engine: How the model runs in process: lean for Llama-family weights, hf for any transformers model.
        device: cpu, cuda:0, ... ; auto takes this rank's GPU where there is one.
        num_threads: CPU threads; 0 is torch's own choice.
        chat_template: File with the template that the prompts were made with, for later turns, where it is neither the
            tokenizer's own nor still where they had it from.
        vllm_args: JSON file of further arguments of vllm.LLM, for engine vllm: {"tensor_parallel_size": 8,
            "speculative_config": {...}}.
        server: Where and how to ask, for engine openai.
    """

    prompts: Path = volatile()
    target: str = volatile()
    output: Path = volatile()
    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    temperature: float = field(default=1.0, kw_only=True)
    max_new_tokens: int = 256
    ignore_eos: bool = False
    seed: int = 0
    limit: int = 0
    batch_size: int = 32
    rows_per_shard: int = 256
    dtype: Dtype = "float32"
    draft: str | None = volatile(None)  # its content is compared by hash
    method: str | None = None
    lm_engine: Literal["auto", "lean", "hf"] = "auto"
    device: str = volatile("auto")
    num_threads: int = volatile(0)
    trust_remote_code: bool = volatile(False, kw_only=True)
    chat_template: Path | None = volatile(None)
    vllm_args: Path | None = volatile(None)  # its content is compared
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        check_positive(self, "max_new_tokens", "batch_size", "rows_per_shard")
        check_not_negative(self, "limit", "num_threads")
        if self.engine != "transformers" and (self.draft or self.method):
            remedy = {"openai": "Let the server draft", "vllm": "Pass a speculative_config in --vllm-args"}[self.engine]
            found = f"a drafter with --engine {self.engine}"
            raise InputError("draft", found, "one with --engine transformers", f"{remedy}, and no --draft or --method.")
        if self.engine != "vllm" and self.vllm_args is not None:
            raise InputError("vllm_args", f"with --engine {self.engine}", "--engine vllm", "Leave them out.")
        _ = self.answering

    @property
    def answering(self) -> AnswerSettings:
        return AnswerSettings(self.target, self.sampling, self.max_new_tokens, self.ignore_eos, self.seed)


@sole_writer(shared=True)
def run(config: ResponsesConfig) -> Path:
    """Write the artefact `responses`; returns its directory."""
    set_threads(config.num_threads)
    manifest = open_artefact(config.prompts, "prompts", text_identity(config.target))
    prompts = Rows(config.prompts, manifest, limit=config.limit, vocab_size=vocabulary_size(config.target))
    with answering(config, manifest, prompts) as who:
        plan = StagePlan(
            kind="responses",
            stage="data responses",
            config=config,
            num_rows=len(prompts),
            fields=FIELDS,
            inputs={"prompts": manifest.digest},
            identity={**manifest.identity, **who.identity},
            sampling={"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p},
            seed=config.seed,
            other_packages=who.packages,
        )
        made = run_stage(plan, who.make)
    tell_supervision(config.output, made)
    return config.output


@dataclass(frozen=True)
class Answering:
    """Who answers. identity: of the target and of what else decides the answers. packages: as of `StagePlan`."""

    make: Callable[[Shard, Advance], ShardContent]
    identity: Mapping[str, Any]
    packages: Callable[[], Mapping[str, str | None]] = dict


@contextmanager
def answering(config: ResponsesConfig, manifest: Manifest, prompts: Rows) -> Iterator[Answering]:
    """What `config.engine` names, for as long as it is asked. manifest: of the prompts."""

    def rounds(engine: Batched | VllmEngine, context: int) -> Callable[[Shard, Advance], ShardContent]:
        return InProcess(engine.answers, prompts, talks_of(config, manifest, context), context).make

    if config.engine == "openai":
        template = manifest.identity.get("chat_template")
        if not isinstance(template, str):
            remedy = f"Make them again with another output: {manifest.command}"
            raise InputError(f"{config.prompts}, chat_template", template, "the hash of the prompts' template", remedy)
        server = ServerEngine(config.server, config.answering, template)
        talks = talks_of(config, manifest, server.context)
        with ServerShards(server, prompts, talks, config.output, config.rows_per_shard) as shards:
            yield Answering(shards.make, {"target": server.identity}, lambda: {"server": server.version()})
    elif config.engine == "vllm":
        with VllmEngine(config.answering, config.dtype, config.vllm_args, config.trust_remote_code) as vllm:
            identity = {"target": vllm.identity, "answered_by": vllm.answered_by}
            yield Answering(rounds(vllm, vllm.context), identity)
    else:
        how = (config.dtype, pick_device(config.device), config.lm_engine, config.trust_remote_code, True)
        lm = load_lm(config.target, *how)
        drafter = ResponseDrafter.load(lm, config.target, config.draft, config.method, lambda path: load_lm(path, *how))
        make = rounds(Batched(lm, config, drafter), lm.info.max_position)
        yield Answering(make, {"target": lm.info.identity, **drafter.identity})


def talks_of(config: ResponsesConfig, manifest: Manifest, context: int | None) -> Talks:
    """Row of prompts -> the conversation that is to be held. context: of the target."""
    bounds = [bound for bound in (manifest.config.get("max_length"), context) if bound]
    tokenizer = None
    if has_later_turns(manifest):
        tokenizer = turns_tokenizer(config.target, manifest, config.chat_template)
    return lambda row: Talk(row, tokenizer, min(bounds, default=None))


@dataclass(frozen=True)
class Batched:
    """Answers turns with our own decoder, `batch_size` at a time."""

    lm: CausalLM
    config: ResponsesConfig
    drafter: ResponseDrafter

    def answers(self, turns: Sequence[Turn]) -> Iterator[tuple[int, TargetTurn]]:
        """Each turn's answer with its place in `turns`, as they are complete."""
        config = self.config
        ends = () if config.ignore_eos else self.lm.info.eos_ids

        def source(i: int) -> RowSource:
            stage = "responses" if turns[i].number == 1 else f"responses/turn-{turns[i].number}"
            return RowSource(stage, config.seed, turns[i].row)

        def drafter(capacity: int) -> Drafter | None:
            return self.drafter.build(capacity, ends, config.batch_size)

        ids = [turn.prompt_ids for turn in turns]
        with name_nonfinite([turn.id for turn in turns]):
            limit, size = config.max_new_tokens, config.batch_size
            for i, tokens in generate_rows(self.lm, ids, config.sampling, limit, size, source, ends, drafter):
                yield i, TargetTurn(tokens, ended=tokens[-1] in ends)


@dataclass(frozen=True)
class InProcess:
    """Answers shards in rounds: the first turns of all conversations, the second ones of those that have one, and so
    on. Rows of a batch are of one shard, and what drafts begins anew with each, so that a row's company, and with it
    the last bits of its logits, does not depend on what was there before or on the number of ranks.

    answers: as of `Batched`. context: the target's.
    """

    answers: Callable[[Sequence[Turn]], Iterable[tuple[int, TargetTurn]]]
    prompts: Rows
    talks: Talks
    context: int

    def make(self, shard: Shard, advance: Advance) -> ShardContent:
        """The answers to a shard of the prompts."""
        talks = [self.talks(row) for row in self.prompts.read(shard.start, shard.stop)]
        held = [(shard.start + offset, talk, 1 / talk.turns_left) for offset, talk in enumerate(talks)]
        for number, talk, _ in held:
            check_context(number, len(talk.asked()["prompt_ids"]), self.context)
        while waiting := [entry for entry in held if entry[1].prompt is not None]:
            asked = [(number, talk.turn, talk.asked()) for number, talk, _ in waiting]
            turns = [Turn(number, turn, row["id"], row["prompt_ids"]) for number, turn, row in asked]
            for i, answer in self.answers(turns):
                _, talk, share = waiting[i]  # how much of a row a turn is
                talk.hear(answer)
                advance(share)
        return shard_content([talk.held() for talk in talks])


def tell_supervision(directory: Path, manifest: Manifest) -> None:
    """Say what can be learned from the responses, and warn where that is little."""
    if place().rank or "loss_mask" not in {spec.name for spec in manifest.fields}:
        return
    masks = (table["loss_mask"] for table in Rows(directory, manifest, ["loss_mask"]).tables())
    lengths = [answer_lengths(*part)[0] for mask in masks for part in ListColumn(mask).parts()]
    learned = Supervision.of(np.concatenate(lengths))
    print_text(f"responses: {learned.text()}")
    if warning := learned.warning():
        log_note(warning)

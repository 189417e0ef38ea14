"""Stage `data prompts`: tokenize chat data of any known shape with the target's chat template."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.data.console import Advance
from draftsmith.data.stages import SELF, PromptsConfig
from draftsmith.data.store.manifest import MANIFEST, STARTED, Field
from draftsmith.data.store.shards import SPLIT, Shard, ShardContent, StagePlan, run_stage
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.text import conversations, template
from draftsmith.data.text.conversations import LANGUAGE, TEXT_ONLY, Chat, OpenTurns
from draftsmith.data.text.lengths import cut_to, length_name
from draftsmith.data.text.logs import NO_ANSWER, num_secrets
from draftsmith.data.text.masks import answered_ids, check_mask, continued_thought, supervised_ids
from draftsmith.data.text.self_prompts import open_prompt, opening_rows, written_turns
from draftsmith.data.text.sources import Row, RowSource, named_split, open_source
from draftsmith.data.text.template import Messages, RowError, TemplateInputs
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.identity import template_hash
from draftsmith.modules.pretrained.reading import read_object
from draftsmith.modules.targets.base import check_ids
from draftsmith.modules.types import InputError

FIELDS = (
    Field("id", "string"),
    Field("prompt_ids", "list<int32>", ("P",)),
    Field("messages", "string"),
    Field("task", "string"),
    Field("later", "string"),
    Field("template_inputs", "string"),
    Field("turn", "int32"),
    Field("labels", "string"),
)
CUT_OFF = "cut_off"  # why a row is dropped whose recorded answer was cut inside of a thought or a call
NOT_CUT = "not_cut"  # why a row is dropped that is shorter than each length of --length, or cannot be cut to one
SUPERVISED_FIELDS = (*FIELDS, Field("input_ids", "list<int32>", ("T",)), Field("loss_mask", "list<bool>", ("T",)))


class Place(NamedTuple):
    """A selected row: the number of its source, its number there, and its id, or the error for which it is dropped."""

    source: int
    row: int
    id: str | RowError


@sole_writer(shared=True)
def run(config: PromptsConfig) -> Path:
    """Write the artifact `prompts` and return its directory."""
    target = Checkpoint(config.target, config.trust_remote_code)
    tokenizer = template.load_chat_tokenizer(target, config.chat_template)
    # Open the sources, and select rows by split, task and limit.
    names = [config.source] if Path(config.source).exists() else config.source.split(",")
    sources = [one_source(name.strip(), config, target, tokenizer) for name in names]
    mapping = conversations.parse_columns(config.columns)
    selected = select_rows(sources, mapping, config)
    digest = sources[0].digest
    if len(sources) > 1:
        digest = hashlib.sha256("".join(source.digest for source in sources).encode()).hexdigest()
    date = template_date(config.output) if template.shows_date(tokenizer) else None
    dated = {"date": date} if date else {}
    if config.supervised:
        check_mask(tokenizer, dated)
    # Tokenize the selected rows, a shard at a time.
    context, vocab_size = config.max_length or target.shape.max_position, target.shape.vocab_size
    if context is not None and config.lengths and config.lengths[-1] >= context:
        expected = f"fewer tokens than {context:,}, with room for an answer"
        raise InputError("length", f"{config.lengths[-1]:,}", expected, "Leave it out, or raise --max-length.")
    plan = StagePlan(
        kind="prompts",
        stage="data prompts",
        config=config,
        num_rows=len(selected),
        fields=SUPERVISED_FIELDS if config.supervised else FIELDS,
        inputs={"source": digest},
        identity={
            **target.text_identity(),
            "chat_template": template_hash(tokenizer),
            # With a template of its own file it does not matter what the target's is.
            **({} if config.chat_template else {"own_template": template_hash(tokenizer)}),
            **({"template_date": date} if date else {}),
        },
    )

    def make_shard(shard: Shard, advance: Advance) -> ShardContent:
        rows, counts = [], Counter[str]()
        for place in selected[shard.start : shard.stop]:
            source = sources[place.source]
            try:
                if isinstance(place.id, RowError):
                    raise place.id
                made, own_counts = encoder.encode(place.id, source.row(place.row))
            except RowError as error:
                check_dropped(source.where(place.row), error, config)
                counts[f"{error.reason}_dropped"] += 1
            else:
                counts.update(own_counts)
                counts.update(f"of_{row['task']}" for row in made if config.lengths)
                for row in made:
                    check_ids(row["input_ids" if config.supervised else "prompt_ids"], vocab_size)
                    rows.append(row)
                    counts["prompt_tokens"] += len(row["prompt_ids"])
                    counts["tokens"] += len(row.get("input_ids", ()))
            advance(1)
        return ShardContent(rows, dict(counts))

    encoder = RowEncoder.of(config, target, tokenizer, mapping=mapping, context=context, dated=dated)
    run_stage(plan, make_shard)
    return config.output


def one_source(name: str, config: PromptsConfig, target: Checkpoint, tokenizer: Any) -> RowSource:
    """Open one of the sources that `--source` names."""
    if name == SELF:
        if config.source != SELF:
            remedy = "Let data responses finish its turns, and name the output of that."
            raise InputError("source", f"{SELF} among {config.source}", f"{SELF} alone", remedy)
        return opening_rows(config.limit)
    if (Path(name) / MANIFEST).exists():
        return written_turns(Path(name), target, tokenizer)
    return open_source(name, config.split, config.subset)


def template_date(output: Path) -> str:
    """Return the date that the template shows: today, or the day on which the stage began."""
    try:
        state = read_object(output / STARTED, {"state": dict})["state"]
    except OSError:
        state = {}
    return state.get("identity.template_date") or datetime.date.today().isoformat()


def select_rows(sources: Sequence[RowSource], mapping: Mapping[str, str], config: PromptsConfig) -> list[Place]:
    """Select rows by split, task and limit. An id that two sources have is prefixed by the source.

    Raises:
        InputError: a mapping of, or a filter on, a column that no row has; nothing left; or an invalid row that may not
            be dropped.
    """
    stems = [Path(source.name).stem for source in sources]
    prefixes = [f"{stem}/" if stems.count(stem) == 1 else f"{i}/" for i, stem in enumerate(stems, 1)]
    prefixes = [
        "" if len(sources) == 1 or source.content_ids else prefix
        for source, prefix in zip(sources, prefixes, strict=True)
    ]
    filters = [("task", config.tasks), ("split", named_split(config.split)), *config.filters.items()]
    allowed = [(name, {part.strip() for part in value.split(",")}) for name, value in filters if value]
    wanted = {name for name, _ in allowed} | {*config.kept} - {LANGUAGE}
    # A data set of one split has no rows to leave out.
    labeled = {"split"} if any(source.split_taken for source in sources) else set()
    selected: list[Place] = []
    first_place: dict[tuple[str, str], tuple[int, int]] = {}
    first_prefix: dict[str, str] = {}
    shared = set[str]()
    absent = set(mapping.values())
    places = ((number, index) for number, source in enumerate(sources) for index in range(len(source)))
    for position, (number, index) in enumerate(places):
        source, prefix = sources[number], prefixes[number]
        try:
            row = source.row(index)
            absent = {name for name in absent - row.keys() if conversations.named_value(row, {}, name) is None}
            labels = {name: conversations.kept_label(row, mapping, name) for name in wanted}
            labeled |= {name for name, text in labels.items() if text}
            if not all(labels[name] in values or (name == "split" and source.split_taken) for name, values in allowed):
                continue
            row_id = conversations.row_label(row, mapping, "id", f"{position:07d}")
            shared |= {row_id} if first_prefix.setdefault(row_id, prefix) != prefix else set()
            first = first_place.setdefault((prefix, row_id), (number, index))
            if first != (number, index):
                found = f"the id {row_id[:80]!r}, which {sources[first[0]].where(first[1])} has too"
                remedy = "Map another column (--columns id=NAME), or pass --invalid drop, which keeps the first."
                raise RowError(found, remedy, "duplicate")
            selected.append(Place(number, index, row_id))
        except RowError as error:
            check_dropped(source.where(index), error, config)
            # A copy, without the frames that a traceback would keep in memory.
            selected.append(Place(number, index, RowError(str(error), error.remedy, error.reason)))
        if len(selected) == config.limit:
            break

    # A column that no row has is a mistake in the options, not an empty result.
    if absent:
        raise InputError("columns", min(absent), "a column of the data", "Correct --columns.")
    for name in wanted - labeled:
        remedy = "Correct it, or map a task or split (--columns). What looks like a secret is not read."
        raise InputError(name, "rows without it", f"a column {name}", remedy)
    if not selected:
        found = f"no rows with {', '.join(f'{name} {value}' for name, value in filters if value)}"
        raise InputError("source", found, "at least one row", "Correct the filters.")
    return [
        place._replace(id=f"{prefixes[place.source]}{place.id}") if place.id in shared else place for place in selected
    ]


def check_dropped(where: str, error: RowError, config: PromptsConfig) -> None:
    """Raise InputError for a row that the options do not allow to be dropped."""
    if not may_drop(error, config):
        remedy = error.remedy or "Correct it, or pass --invalid drop."
        raise InputError(where, error, "a usable row", remedy) from error


def may_drop(error: RowError, config: PromptsConfig) -> bool:
    """Return whether the options allow to drop a row for this reason."""
    # Of a file some rows are long enough, of a log some requests are answered, and the others are no fault.
    return (
        error.reason in (NOT_CUT, NO_ANSWER, CUT_OFF)
        or (config.overlong if error.reason == "overlong" else config.invalid) == "drop"
    )


@dataclass(frozen=True)
class RowEncoder:
    """Reader of chats: makes rows of the artifact `prompts`, which `eval bench` asks and replays too.

    ends: the target's end tokens. between: see `part_separator`. media: `Checkpoint.media_tokens` of the target.
    context: most tokens of a prompt with an answer. dated: the date, for a template that shows it.
    """

    tokenizer: Any
    config: PromptsConfig
    ends: Collection[int]
    between: str
    media: Sequence[str]
    mapping: Mapping[str, str] = field(default_factory=dict)
    context: int | None = None
    dated: TemplateInputs = field(default_factory=dict)

    @classmethod
    def of(cls, config: PromptsConfig, target: Checkpoint, tokenizer: Any, **more: Any) -> RowEncoder:
        """Make the encoder of a target's prompts. tokenizer: with their chat template. more: further fields."""
        ends = target.end_tokens if config.supervised else ()
        return cls(tokenizer, config, ends, template.part_separator(tokenizer), target.media_tokens, **more)

    def encode(self, row_id: str, row: Row) -> tuple[list[dict[str, Any]], Counter[str]]:
        """Tokenize a source's row; return the prompts' rows and their counts (later_turns, ...).

        Raises:
            RowError: the row cannot be used.
        """
        config, counts = self.config, Counter[str]()
        if config.source == SELF:
            return [open_prompt(row, self.tokenizer, self.dated)], counts
        chat = conversations.read_chat(row, self.mapping, self.between)
        said = to_json([chat.messages, chat.later], "a message")
        if shown := next((token for token in self.media if token in said), None):
            raise RowError(f"text with {shown}, in whose place the target reads an image or sound", TEXT_ONLY, "media")
        inputs = {**chat.inputs, **self.dated}
        labels = {name: conversations.kept_label(row, self.mapping, name) for name in ("task", *config.kept)}
        columns = {"task": labels["task"], "labels": to_json({name: labels[name] for name in config.kept}, "a column")}
        counts["secrets_removed"] += num_secrets(row) if chat.logged else 0
        if config.lengths:
            rows = [{**columns, **made} for made in self.of_lengths(row_id, chat, inputs)]
            counts[SPLIT] += len(rows) - 1
            return rows, counts
        if chat.logged and config.turns == "first":
            expected = "all: of a logged request the last, as other requests have the turns before it"
            raise InputError("turns", "first with a logged request", expected, "Leave it out.")
        turns = "last" if chat.logged else config.turns
        alone = config.supervised and turns in ("each", "last")
        asked = conversations.open_turns(chat, "each" if alone else turns)
        if alone:
            learned = set(range(len(chat.messages))).difference(chat.not_learned)
            asked = [turn for turn in asked if len(turn.opening) in learned]
            if not asked:
                raise RowError("no answer to learn from", reason=NO_ANSWER if chat.logged else "invalid")
            asked = asked[-1:] if turns == "last" else asked
        elif config.supervised:
            # One row holds all recorded answers.
            asked = asked[:1]
        rows = list[dict[str, Any]]()
        for number, turn in enumerate(asked):
            turn_id = f"{row_id}/turn-{turn.turn}" if number else row_id
            try:
                encoded, used = self.encode_turn(chat, turn, inputs, alone)
            except RowError as error:
                # Later turns contain the same message, so they fail too.
                if not rows or not may_drop(error, config):
                    raise
                reason = "beyond_context" if error.reason == "overlong" else "refused_by_template"
                counts[f"turns_{reason}"] += len(asked) - number
                break
            rows.append({"id": turn_id, **columns, **encoded})
            prompt = encoded["prompt_ids"]
            if alone and encoded["input_ids"][: len(prompt)] != prompt:
                counts["prompt_not_shown"] += 1
            counts["later_turns"] += len(turn.later)
            counts["turns_not_asked"] += turn.not_asked
        counts[SPLIT] += len(rows) - 1
        counts.update(f"{name}_ignored" for name in chat.ignored)
        counts.update(f"{name}_not_shown" for name in template.not_shown(self.tokenizer, used, inputs))
        return rows, counts

    def of_lengths(self, row_id: str, chat: Chat, inputs: TemplateInputs) -> list[dict[str, Any]]:
        """Return a prompt of each length of --length that the row has, with the length as its task.

        Raises:
            RowError: the row has none of them.
        """
        opening, rows = conversations.open_turns(chat, "last")[0].opening, list[dict[str, Any]]()
        for length in self.config.lengths:
            name = length_name(length)
            if (made := cut_to(self.tokenizer, opening, inputs, length)) is not None:
                turn = OpenTurns(made[0], turn=1 + sum(message["role"] == "assistant" for message in made[0]))
                rows.append({"id": f"{row_id}/{name}", "task": name, **prompt_fields(turn, made[1], inputs)})
        if not rows:
            raise RowError(f"fewer tokens than {self.config.lengths[0]:,}, or no message to shorten", reason=NOT_CUT)
        return rows

    def encode_turn(
        self, chat: Chat, turn: OpenTurns, inputs: TemplateInputs, alone: bool
    ) -> tuple[dict[str, Any], Messages]:
        """Tokenize what is asked in one turn; return the prompt's fields and the messages that they were made from.

        alone: keep the recorded answer to this turn, not those of the whole chat.

        Raises:
            RowError: the template refuses it, it is too long, or has nothing to learn from.
        """
        tokenizer, used = self.tokenizer, turn.opening
        prompt = template.render(tokenizer, turn.opening, inputs, add_generation_prompt=True)
        template.check_length(tokenizer, prompt, self.context)
        encoded = prompt_fields(turn, template.encode(tokenizer, prompt), inputs)
        # Leave room for one token of an answer.
        length = len(encoded["prompt_ids"]) + 1
        if self.config.supervised:
            # What follows the last answer has nothing to learn from.
            recorded = chat.messages[: len(turn.opening) + 1] if alone else chat.messages
            used = conversations.up_to_last("assistant", recorded)
            conversations.check_answers(used)
            template.check_length(tokenizer, template.render(tokenizer, used, inputs), self.context)
            if alone:
                ids, mask = answered_ids(tokenizer, used, inputs, self.ends)
                if chat.cut and (used[-1].get("tool_calls") or not used[-1]["content"]):
                    raise RowError("an answer that was cut inside of a thought or a call", reason=CUT_OFF)
                # The template ends an answer that its model did not end.
                while chat.cut and (not mask[-1] or ids[-1] in self.ends):
                    del ids[-1], mask[-1]
            else:
                ids, mask = supervised_ids(tokenizer, used, inputs, chat.not_learned, self.ends)
            encoded |= {"input_ids": ids, "loss_mask": mask}
            length = len(ids)
            if alone and (written := continued_thought(prompt, used[-1])):
                # All of this answer is shown, but a thought beside another one in its text.
                thought = used[-1].get("reasoning_content", "").strip()
                beside = {"role": "assistant", "content": template.PLACEHOLDER, "reasoning_content": thought}
                used = [*turn.opening, beside] if thought not in written else turn.opening
        elif turn.later:
            # Messages between the later answers may not be printed either; a template that refuses one does so later.
            answer = {"role": "assistant", "content": template.PLACEHOLDER}
            whole = [*turn.opening, *(message for said in turn.later for message in (answer, *said))]
            with suppress(RowError):
                template.render(tokenizer, whole, inputs)
                used = whole
        if self.context is not None and length > self.context:
            found = f"{length} tokens (one for an answer included), more than {self.context}"
            raise RowError(found, template.TOO_LONG_REMEDY, "overlong")
        return encoded, used


def prompt_fields(turn: OpenTurns, prompt: list[int], inputs: TemplateInputs) -> dict[str, Any]:
    """Return the fields of a prompt's row, but its id and task. prompt: its tokens."""
    return {
        "prompt_ids": prompt,
        "messages": to_json(turn.opening, "a message"),
        "later": to_json(turn.later, "a later turn"),
        "template_inputs": to_json(inputs, "tools or chat_template_kwargs"),
        "turn": turn.turn,
    }


def to_json(value: Any, what: str) -> str:
    """Return a row's value as JSON; a date of a table becomes text. what: names it in the error."""
    return conversations.well_formed(json.dumps(value, ensure_ascii=False, default=str), what)

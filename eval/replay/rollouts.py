"""Rollouts: at every position of the target's own text the draft that begins there, and where the target leaves it.

The text X is the target's, answered once. A round that begins at position t drafts y_1, y_2, ...; coupled with X, the
target's verdicts are known without asking it again: drafted token d meets X_{t+d-1}. Greedy it is accepted where it is
that token. Sampling, X ~ p is given first and the draft drawn to fit: with x = X_{t+d-1}, accepted (and then y = x)
with probability min(1, q(x)/p(x)), else y ~ norm((q - p)+). Summed over X this is y ~ q accepted with min(1,
p(y)/q(y)), the target's own token after a rejection being X's (a maximal coupling of Leviathan et al. 2023, algorithm
1). One uniform number a position decides for every round that meets it. So what any stop rule does is read off the
rollouts: rounds of a replay walk X from t to t + accepted + 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from draftsmith.data.store.files import make_directory, write_json, write_table
from draftsmith.data.store.manifest import differences, flatten, warn_not_compared, without_unrecorded
from draftsmith.data.store.reading import read_object
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.modules.types import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SETTINGS, HEAD, META = "rollouts.json", "head:", b"draftsmith"


@dataclass(frozen=True)
class TargetAnswer:
    """The target's text on one prompt. room: the most tokens it could have had (`max_new_tokens`, or the context's
    end), which bounds the drafts near it."""

    id: str
    task: str
    prompt_tokens: int
    tokens: list[int]
    ended: bool
    room: int


@dataclass(frozen=True)
class ChainRollouts:
    """S rounds that begin everywhere in the answers, each drafted K tokens deep whatever the target says.

    answer [S]: number of the answer. start [S]: tokens of the answer before the round, 1 or more (the first token is
    the prefill's). For answer a the rounds are consecutive, start 1 .. len(tokens) - 1. token [S, K]: drafted, along X
    until the first rejection and then as the draft itself goes on. num_accepted [S]: of a draft of K tokens, at most
    what is left of X. log_q, log_max_q, entropy [S, K]: of the distribution that token was drawn from (greedy: the
    draft's softmax), log q of the token itself, nats. accept_prob [S, K]: min(1, p/q) of the token (greedy: 1 or 0),
    down to and with the first rejected token; NaN below it and beyond X's end. heads: label -> raw logits [S, K] of an
    acceptance head for each token; of one that reads the state after it, NaN where the drafter has not read the token.
    accept_along [S, K]: min(1, p/q) of every drafted token where the target reads the draft itself, so below the first
    rejection too: what a policy that knew p and q would look at. None: not asked for, or greedy.
    repeat [S, K]: how each token goes on with a repetition of prompt and answer (`acceptance.repeats.Repeats.score`).
    None: not looked for.
    past_end [S]: drafted tokens accepted after X's end token, where all before them were: what the target would have
    gone on with counts in a round's `num_accepted`, though it is never emitted. None: no answer was read on.
    Where the drafter's context ends, drafts are shorter: token is -1 there, and the floats are NaN.
    """

    answers: list[TargetAnswer]
    answer: Ints
    start: Ints
    token: Ints
    num_accepted: Ints
    log_q: Floats
    log_max_q: Floats
    entropy: Floats
    accept_prob: Floats
    heads: Mapping[str, Floats] = field(default_factory=dict)
    past_end: Ints | None = None
    accept_along: Floats | None = None
    repeat: Floats | None = None

    @property
    def depth(self) -> int:
        """K."""
        return self.token.shape[1]

    def verified(self) -> NDArray[np.bool_]:
        """[S, K]: drafted tokens down to and with the first that was rejected, within X: those with a label."""
        return ~np.isnan(self.accept_prob)

    def available(self) -> Ints:
        """[S]: tokens that the drafter could draft, K but for the end of its context."""
        return (self.token >= 0).sum(1)


@dataclass(frozen=True)
class TreeRollouts:
    """S rounds as of `ChainRollouts`, each with all the candidates of an EAGLE-2 tree of one `topk`.

    rank [S, D, D]: for trees of at most d+1 levels ([:, d]), the place that the candidate on X at level j+1 has among
    all candidates of these levels, by value, best first; -1 where no candidate is on X. A tree of m nodes holds
    exactly the candidates of rank < m, so it accepts as many levels as ranks below m follow each other. It goes on past
    X's end token, with what the target would have gone on with, as a round's `num_accepted` does.
    levels [S]: at most D, that the drafter's context allowed.
    """

    answers: list[TargetAnswer]
    answer: Ints
    start: Ints
    topk: int
    rank: Ints
    levels: Ints

    @property
    def depth(self) -> int:
        """`DynamicTree.depth`, times that nodes were expanded: one less than the D levels."""
        return self.rank.shape[1] - 1


Rollouts = TypeVar("Rollouts", ChainRollouts, TreeRollouts)


def joined(parts: Sequence[Rollouts]) -> Rollouts:
    """Recordings by one drafter, of one depth and with the same heads, as one; their answers are counted on."""
    first = parts[0]
    arrays: dict[str, Any] = {}
    for item in fields(first):
        value = getattr(first, item.name)
        if isinstance(value, np.ndarray):
            arrays[item.name] = np.concatenate([getattr(part, item.name) for part in parts])
        elif isinstance(value, Mapping):
            arrays[item.name] = {k: np.concatenate([getattr(part, item.name)[k] for part in parts]) for k in value}
    before = np.cumsum([0, *(len(part.answers) for part in parts)])
    arrays["answer"] = np.concatenate([part.answer + n for part, n in zip(parts, before, strict=False)])
    return replace(first, answers=[answer for part in parts for answer in part.answers], **arrays)


def recorded(
    directory: Path,
    prompts: Sequence[BenchPrompt],
    settings: Mapping[str, Any],
    record: Callable[[BenchPrompt, int], ChainRollouts],
    progress: Callable[[int], None] = lambda count: None,
) -> ChainRollouts:
    """Rollouts of all prompts: answers that are in the directory are read, the others recorded and written there, one a
    Parquet file with one row a round, so that recording can go on where it was interrupted.

    settings: JSON that says what they were made with. record: makes the rollouts of a prompt and its number.

    Raises:
        InputError: the directory holds rollouts that were made otherwise.
    """
    make_directory(directory)
    made_with = json.loads(json.dumps({**settings, "prompts": [prompt.id for prompt in prompts]}))
    path = directory / SETTINGS
    if path.exists():
        different, unrecorded = without_unrecorded(differences(flatten(read_object(path, {})), flatten(made_with)))
        warn_not_compared(str(path), unrecorded)
        if different:
            found = f"rollouts in {directory} made with another {', '.join(name for name, _, _ in different)}"
            raise InputError("output", found, "the settings of this run", "Choose another directory, or remove it.")
    else:
        write_json(path, made_with)
    parts = []
    for number, prompt in enumerate(prompts):
        file = directory / f"answer-{number:05d}.parquet"
        if not file.exists():
            write_answer(record(prompt, number), file)
        parts.append(read_answer(file))
        progress(1)
    return joined(parts)


def write_answer(rollouts: ChainRollouts, path: Path) -> None:
    """One answer's rounds; the answer itself, and the arrays' shapes, go into the file's metadata."""
    (answer,) = rollouts.answers
    arrays = {HEAD + label: logits for label, logits in rollouts.heads.items()}
    arrays |= {name: value for name, value in vars(rollouts).items() if isinstance(value, np.ndarray)}
    columns = {}
    for name, array in arrays.items():
        flat = pa.array(array.reshape(-1))
        columns[name] = flat if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, array.shape[1])
    shapes = {name: array.shape[1:] for name, array in arrays.items()}
    meta = {META: json.dumps({"answer": asdict(answer), "shapes": shapes})}
    write_table(path, pa.table(columns).replace_schema_metadata(meta))


def read_answer(path: Path) -> ChainRollouts:
    """What `write_answer` wrote, of earlier versions too, which kept more columns.

    Raises:
        InputError: the file is something else.
    """
    try:
        table = pq.read_table(path)
        meta = json.loads(table.schema.metadata[META])
        arrays = {}
        for name, shape in meta["shapes"].items():
            column = table.column(name).combine_chunks()
            flat = column.flatten() if shape else column
            arrays[name] = flat.to_numpy(zero_copy_only=False).reshape(len(table), *shape)
        heads = {name.removeprefix(HEAD): array for name, array in arrays.items() if name.startswith(HEAD)}
        known = {item.name: arrays[item.name] for item in fields(ChainRollouts) if item.name in arrays}
        return ChainRollouts(answers=[TargetAnswer(**meta["answer"])], heads=heads, **known)
    except Exception as error:  # of Arrow, of JSON, or of what is not in it
        found = f"damaged ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise InputError(str(path), found, "rollouts of one answer", "Delete it: it is recorded again.") from error

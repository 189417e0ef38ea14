"""Response generation with our own decoder: many prompts at a time, with or without a drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.store.shards import row_generator
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.loop import DEFAULTS, DecodeOptions, RowAnswer, RowPool
from draftsmith.modules.drafters.method import Method, Models
from draftsmith.modules.drafters.methods import chain_method, parse_method
from draftsmith.modules.pretrained.heads import load_drafter
from draftsmith.modules.pretrained.tokenizers import check_same_tokenizer
from draftsmith.modules.sampling import Source, TorchSource
from draftsmith.modules.targets.base import CausalLM, check_ids
from draftsmith.modules.types import InputError, SamplingParams


class RowUniforms(TorchSource):
    """Random source of one row, drawing the numbers of `row_uniforms`; without a drafter one per token."""

    def __init__(self, stage: str, seed: int, row: int):
        self._numbers, self._uniforms = row_generator(stage, seed, row), []

    def _fill(self) -> None:
        # The list is a stack: new numbers go below those that are left, in reverse.
        self._uniforms = [*self._numbers.random(self.BLOCK).tolist()[::-1], *self._uniforms]


def length_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Group row numbers into batches of similar length, longest first so that running out of memory shows at once."""
    # Rows of equal length keep their order, so that every run makes the same batches.
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def generate_rows(
    lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_new_tokens: int,
    batch_size: int,
    sources: Callable[[int], Source] | None = None,
    eos_ids: Sequence[int] | None = None,
    build_drafter: Callable[[int], Drafter | None] = lambda capacity: None,
) -> Iterator[tuple[int, list[int]]]:
    """Yield (prompt number, response tokens) as responses finish.

    A response ends with an end token, after `max_new_tokens`, or at the end of the context. The longest prompts are
    read first, and a finished row makes room for the next prompt.

    prompts: each shorter than the context. sources: prompt number -> random source; greedy decoding needs none.
    eos_ids: end tokens; None takes the target's, () never ends. build_drafter: capacity in tokens per row -> a drafter
    for `batch_size` rows.

    Raises:
        NonFinite: a model returned NaN or infinity for the prompt `row`.
    """
    assert params.greedy or sources is not None, "sampling needs a random source per row"
    longest = min(max(map(len, prompts)) + max_new_tokens, lm.info.max_position)
    drafter = build_drafter(longest + DEFAULTS.max_nodes + 1)
    aux_layers, nodes = ((), 0) if drafter is None else (drafter.aux_layers, DEFAULTS.max_nodes)
    num_rows = min(batch_size, len(prompts))
    setup = DecodeOptions(session=lm.session(num_rows, longest + nodes + 1, aux_layers), max_nodes=nodes)
    waiting = (
        RowAnswer(lm.info, prompts[i], max_new_tokens, sources(i) if sources else TorchSource(0), eos_ids, i)
        for i in sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    )
    for row in RowPool(lm, drafter, params, num_rows, longest, setup).run(waiting):
        yield row.number, row.tokens


def generate_all(lm: CausalLM, prompts: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
    """Return the responses of `generate_rows` in the order of the prompts."""
    responses = dict(generate_rows(lm, prompts, *args, **kwargs))
    return [responses[i] for i in range(len(prompts))]


def check_lengths(rows: Sequence[dict[str, Any]], first: int, context: int) -> None:
    """Raise InputError if a row is longer than the context. first: number of the first row."""
    for number, row in enumerate(rows, first):
        if (length := len(row["input_ids"])) > context:
            remedy = "Make shorter ones: data responses --max-new-tokens, data prompts --max-length."
            raise InputError(f"row {number}", f"{length} tokens", f"at most {context}, the context", remedy)


def pad_right(rows: Sequence[Sequence[int]], lm: CausalLM) -> Tensor:
    """Pad rows with zeros to token ids [B, T] on the model's device.

    Causal attention keeps the padding from changing anything in front of it.
    """
    for row in rows:
        check_ids(row, lm.info.vocab_size)
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=lm.device)


def set_threads(num_threads: int) -> None:
    """Set torch's CPU threads; 0 keeps its default."""
    if num_threads:
        torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class ResponseDrafter:
    """Drafting method of `data responses` with the model or head that it uses; identity is recorded in the manifest."""

    target: CausalLM
    method: Method
    draft: CausalLM | None = None
    heads: Mapping[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        target: CausalLM,
        target_path: str,
        draft_path: str | None,
        label: str | None,
        load: Callable[[str], CausalLM],
    ) -> ResponseDrafter:
        """Load --draft and choose the method. label: --method. load: path -> model."""
        if draft_path is None:
            return cls(target, select_method(label or "ar", ""))
        drafter = load_drafter(draft_path, lambda: target, load)
        method = select_method(label or chain_method(drafter.name), drafter.name)
        identity = {"drafted_by": drafter.identity}
        if drafter.head is not None:
            return cls(target, method, heads={drafter.name: drafter.head}, identity=identity)
        check_same_tokenizer(target_path, draft_path)
        drafter.lm.fit_vocabulary(target.info.vocab_size)
        return cls(target, method, drafter.lm, identity=identity)

    def build(self, capacity: int, ends: tuple[int, ...], num_rows: int) -> Drafter | None:
        """Build a fresh drafter. capacity: most tokens per row, drafts included. ends: end tokens."""
        # What a drafter learned must not reach the next shard: shards are the same on any number of ranks.
        models = Models(self.target, self.draft, heads=self.heads, capacity=capacity, ends=ends)
        return self.method.build(models, num_rows)


def select_method(label: str, draft_kind: str) -> Method:
    """Parse a method label and check that it can draft responses. draft_kind: `draft`, a head's kind, or empty."""
    method = parse_method(label)
    missing = [need for need in method.needs if need != draft_kind]
    if missing or (draft_kind and not method.needs):
        found = f"--draft, which is {draft_kind}" if draft_kind else "no --draft"
        expected = f"--draft {missing[0]}" if missing else "no --draft"
        raise InputError("method", f"{label} with {found}", expected, "Change one of the two.")
    if not method.lossless or method.timed or method.trees or not method.batchable:
        expected = "a lossless method for several rows, without measured times or a tree file"
        raise InputError("method", label, expected, "Choose another, or set its numbers (online:c=0.1).")
    return method

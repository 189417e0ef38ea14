"""Answer prompts and keep the hidden states that the target computes meanwhile, which `data features` then need not.

A head is trained on a target's answers and on its states along them. Two stages make these, `data responses` and
`data features`, and the second reads every token again. On a CPU that doubles the cost of a head's data. This script
makes both artifacts, each with its stage's own code, and reads once: the states of each answer stay in OUTPUT/states
until the second stage stores them.

    python benchmarks/answers.py --prompts runs/prompts --target TARGET --output runs/answers --max-new-tokens 192
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from draftsmith.data import features, responses
from draftsmith.data.engines import own
from draftsmith.data.settings import FeaturesConfig, ResponsesConfig
from draftsmith.modules.decoding.loop import RowAnswer, RowPool
from draftsmith.modules.pretrained.files import write_tensors

Text = tuple[int, ...]
# Answers that are kept in one file; a killed run loses fewer.
ROWS_TOGETHER = 32


class Recorded:
    """A target's session that keeps the states of the rows of a pool, in bfloat16, by the prompt's number."""

    def __init__(self, session: Any, pool: RecordingPool):
        self._session, self._pool = session, pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def prefill(self, places: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        scores = self._session.prefill(places, prompts)
        for row, prompt, states in zip(self._pool.fresh, prompts, scores.features, strict=True):
            self._pool.states[row.number] = [states[: len(prompt)].to(torch.bfloat16)]
        return scores

    def extend(self, tokens: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
        scores = self._session.extend(tokens, *args, **kwargs)
        states = scores.features.to(torch.bfloat16)  # [B, 1, L*H]
        for place, (row, ids) in enumerate(zip(self._pool.rows, tokens, strict=True)):
            if len(ids):
                self._pool.states[row.number].append(states[place])
        return scores


class RecordingPool(RowPool):
    """Rows that are answered while their states are kept, and saved when the answer is finished."""

    layers: tuple[int, ...]
    directory: Path

    def __init__(self, target: Any, drafter: Any, params: Any, rows: int, longest: int, options: Any):
        super().__init__(target, drafter, params, rows, longest, options)
        self.states: dict[int, list[torch.Tensor]] = {}
        self.fresh: Sequence[RowAnswer] = ()
        self._session: Any = Recorded(target.session(rows, longest + 1, self.layers), self)
        self._saved: dict[str, torch.Tensor] = {}

    @property
    def rows(self) -> list[RowAnswer]:
        return self._rows

    def admit(self, fresh: Sequence[RowAnswer]) -> list[RowAnswer]:
        self.fresh = fresh
        return super().admit(fresh)

    def run(self, waiting: Any) -> Iterator[RowAnswer]:
        for row in super().run(waiting):
            states = torch.cat(self.states.pop(row.number))
            key = str(row.number)
            # The last token is never read, and teaches nothing: nothing follows it.
            self._saved[key] = torch.cat([states, states[-1:]])
            self._saved[f"{key}.ids"] = torch.tensor([*row.prompt, *row.tokens])
            self._saved[f"{key}.prompt"] = torch.tensor([len(row.prompt)])
            yield row
            if len(self._saved) > 3 * ROWS_TOGETHER:
                self.save()
        self.save()
        # It refers to this pool, and holds the caches of all rows.
        self._session = None

    def save(self) -> None:
        if not self._saved:
            return
        number = len(list(self.directory.glob("*.safetensors")))
        write_tensors(self.directory / f"{number:05}.safetensors", self._saved)
        self._saved = {}


@dataclass
class Kept:
    """Answers that were kept, by their prompt, and where the states of a text are."""

    answers: dict[Text, list[int]] = field(default_factory=dict)
    states: dict[Text, tuple[Path, str]] = field(default_factory=dict)

    def read(self, directory: Path) -> Kept:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for key in [key.removesuffix(".ids") for key in file.keys() if key.endswith(".ids")]:  # noqa: SIM118
                    ids, length = file.get_tensor(f"{key}.ids").tolist(), int(file.get_tensor(f"{key}.prompt"))
                    self.answers[tuple(ids[:length])] = ids[length:]
                    self.states[tuple(ids)] = path, key
        return self


def answer_missing(kept: Kept, generate: Any) -> Any:
    """Return `generate_rows`, which then answers only prompts without an answer that is kept."""

    def generate_rows(lm: Any, prompts: Sequence[Sequence[int]], *args: Any) -> Iterator[tuple[int, list[int]]]:
        missing = [i for i, prompt in enumerate(prompts) if tuple(prompt) not in kept.answers]
        for i in sorted({*range(len(prompts))} - {*missing}):
            yield i, kept.answers[tuple(prompts[i])]
        if missing:
            for i, tokens in generate(lm, [prompts[i] for i in missing], *args):
                yield missing[i], tokens

    return generate_rows


class KeptStates(features.OwnStates):
    """The states that were kept, and those that are read for texts of which none were."""

    kept: Kept

    def read(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, Any]]:
        missing = [number for number, row in enumerate(rows) if tuple(row) not in self.kept.states]
        for number in sorted({*range(len(rows))} - {*missing}):
            path, key = self.kept.states[tuple(rows[number])]
            with safe_open(path, "pt") as file:
                yield number, features.feature_codec.encode(file.get_tensor(key), self.config.feature_dtype)
        for number, stored in super().read([rows[i] for i in missing]):
            yield missing[number], stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("prompts", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--states", type=Path, help="where answers and states are kept and found (OUTPUT/states)")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rows-per-shard", type=int, default=256)
    parser.add_argument("--limit", type=int, default=0)
    options = parser.parse_args()
    states = options.states or options.output / "states"
    states.mkdir(parents=True, exist_ok=True)

    shape = features.target_shape(options.target)
    RecordingPool.layers, RecordingPool.directory = features.captured_layers("eagle3", (), shape), states
    # The stages' own engines, with their states kept and read again. mypy takes an assigned class for a mistake.
    own.RowPool = RecordingPool  # type: ignore[assignment, misc]
    own.generate_rows = answer_missing(Kept().read(states), own.generate_rows)
    answers = options.output / "responses"
    sizes = (options.max_new_tokens, options.batch_size, options.rows_per_shard, options.limit)
    names = ("max_new_tokens", "batch_size", "rows_per_shard", "limit")
    common = {"target": options.target, "num_threads": 1}
    responses.run(
        ResponsesConfig(
            prompts=options.prompts, output=answers, temperature=0.0, **common, **dict(zip(names, sizes, strict=True))
        )
    )

    KeptStates.kept = Kept().read(states)
    # As above.
    features.OwnStates = KeptStates  # type: ignore[misc]
    features.run(FeaturesConfig(responses=answers, output=options.output / "features", drafter="eagle3", **common))


if __name__ == "__main__":
    main()

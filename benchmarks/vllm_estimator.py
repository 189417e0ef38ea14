"""How well P(accept) is known by vLLM's own estimator and by ours, on rounds of a real pair; neither needs a GPU.

    python -m draftsmith.benchmarks.vllm_estimator record TRACE --target embedded:target --draft embedded:draft \
        --prompts embedded:prompts --temperature 0
    ENGINE/bin/python -m draftsmith.benchmarks.vllm_estimator replay TRACE [TRACE ...]

ENGINE is an environment with vLLM and Triton, whose interpreter runs vLLM's kernels on a CPU; there this project is
found by PYTHONPATH. The estimators are driven as the engine does. Priors are fitted to every second prompt, the others
are replayed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.models.loading import load_lm
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.bootstrap import Resamples
from draftsmith.modules.acceptance.served import NUM_FEATURES, ServedEstimator, ServedTexts, Start, fit_priors
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.protocols import DraftView, StopPolicy
from draftsmith.modules.drafters.draft_model import DraftModelDrafter
from draftsmith.modules.metrics import expected_calibration_error, soft_label_auc
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

CPU = torch.device("cpu")
CAPACITY, NEW_TOKENS, RESAMPLES = 2048, 96, 300
Estimator = Any  # vLLM's, or one like it


@dataclass
class Round:
    """One of a request: its text's length before, the drafts' logits [K, V], their tokens, how many were accepted."""

    length: int
    logits: Tensor
    tokens: list[int]
    accepted: int = 0


class Recorder(StopPolicy):
    """Drafts of a fixed length, whose logits and verdicts are kept."""

    def __init__(self, length: int):
        self.max_drafted, self.rounds, self.text = length, list[Round](), list[int]()
        self._logits = list[Tensor]()

    def should_stop(self, view: DraftView) -> bool:
        if view.num_drafted == 1:
            self.text, self._logits = list(view.context), []
            self.rounds.append(Round(len(view.context), view.logits[:0], []))
        self._logits.append(view.logits.detach().clone())
        self.rounds[-1].tokens.append(view.token)
        self.rounds[-1].logits = torch.stack(self._logits)
        return view.num_drafted >= self.max_drafted

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted:
            self.rounds[-1].accepted = num_accepted


def record(args: argparse.Namespace) -> None:
    """One conversation a prompt, with its rounds."""
    target, draft = load_lm(args.target, packed=True), load_lm(args.draft, packed=True)
    params, made = SamplingParams(args.temperature), list[dict[str, Any]]()
    for number, prompt in enumerate(read_prompts(args.prompts, args.target, "test", limit=args.limit)):
        kept = Recorder(args.length)
        drafter = DraftModelDrafter(draft, [kept], CAPACITY)
        answer = generate_one(target, drafter, prompt.prompt_ids, params, NEW_TOKENS, TorchSource(number))
        rounds = [vars(one) for one in kept.rounds]
        made.append({"id": prompt.id, "text": [*prompt.prompt_ids, *answer.tokens], "rounds": rounds})
    args.trace.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"temperature": args.temperature, "length": args.length, "requests": made}, args.trace)
    accepted = [one["accepted"] for request in made for one in request["rounds"]]
    print(f"{args.trace}: {len(made)} prompts, {len(accepted)} rounds, {1 + np.mean(accepted):.2f} tokens a round")


@dataclass
class Slot:
    """A request that is being served."""

    number: int
    rounds: list[Round]
    at: int = 0
    verdict: tuple[int, int] = (1, 0)  # tokens sampled and drafts rejected


@dataclass
class Served:
    """What one estimator said: of every drafted token a row of `said` (prompt, place, P, label: -1 for never reached),
    and of every round one of `kept` (prompt, tokens, its share of the time)."""

    said: np.ndarray
    kept: np.ndarray
    seconds_a_step: float


class Server:
    """A batch of requests, of which one that ends is followed by the next; its state is laid out as vLLM's is."""

    def __init__(self, trace: dict[str, Any], numbers: Sequence[int], concurrency: int):
        requests = trace["requests"]
        self.length, self.temperature = trace["length"], trace["temperature"]
        self.queue = [(n, requests[n]["text"], [Round(**one) for one in requests[n]["rounds"]]) for n in numbers]
        longest = max(len(text) for _, text, _ in self.queue) + self.length + 1
        self.slots: list[Slot | None] = [None] * concurrency
        self.ids = dict[int, str]()
        self.texts = ServedTexts(
            tokens=torch.zeros(concurrency, longest, dtype=torch.int32),
            lengths=torch.zeros(concurrency, dtype=torch.int32),
            drafted=torch.zeros(concurrency, self.length, dtype=torch.int64),
            greedy_drafts=False,
            requests=self.ids,
            num_read=np.zeros(concurrency, np.int32),
        )

    def fill(self) -> list[int]:
        """Places of the requests that have a round to come."""
        for place, slot in enumerate(self.slots):
            if slot is not None and slot.at < len(slot.rounds):
                continue
            self.slots[place] = None
            self.ids.pop(place, None)
            while self.queue and self.slots[place] is None:
                number, text, rounds = self.queue.pop(0)
                if rounds:
                    self.slots[place] = Slot(number, rounds)
                    self.ids[place] = str(number)
                    self.texts.tokens[place, : len(text)] = torch.tensor(text)
                    self.texts.num_read[place] = rounds[0].length - 1
        return [place for place, slot in enumerate(self.slots) if slot is not None]


def serve(server: Server, estimator: Estimator, admit: Callable[[Tensor, Tensor, Tensor, int], Any] | None) -> Served:
    """Replay all requests. admit: gives the number of drafts that are verified, of confidences [R, K] and the batch's
    places and lengths, and the time that takes; None verifies all."""
    said, kept, seconds, steps = [], [], 0.0, 0
    conf = torch.ones(len(server.slots), server.length)
    temperature = torch.full((len(server.slots),), server.temperature)
    while places := server.fill():
        batch = [slot for slot in server.slots if slot is not None]
        now = [slot.rounds[slot.at] for slot in batch]
        index = torch.tensor(places)
        server.texts.lengths[index] = torch.tensor([one.length for one in now], dtype=torch.int32)
        verdicts = torch.tensor([slot.verdict for slot in batch], dtype=torch.int32)
        began = time.process_time()
        estimator.step(index, verdicts[:, 0], verdicts[:, 1])
        seconds += time.process_time() - began
        for k in range(server.length):
            logits = torch.stack([one.logits[min(k, len(one.tokens) - 1)] for one in now])
            began = time.process_time()
            estimator.predict(logits, index, torch.tensor(k), conf, temperature)
            seconds += time.process_time() - began
            drawn = [one.tokens[min(k, len(one.tokens) - 1)] for one in now]
            server.texts.drafted[: len(now), k] = torch.tensor(drawn)
        steps += 1
        lengths = torch.tensor([len(one.tokens) for one in now], dtype=torch.int32)
        count, spent = (lengths, 1.0) if admit is None else admit(conf, index, lengths, len(places))
        for row, (slot, one, left) in enumerate(zip(batch, now, count.tolist(), strict=True)):
            good = min(one.accepted, left)
            slot.verdict, slot.at = (good + 1, left - good), slot.at + 1
            kept.append((slot.number, good + 1, spent / len(batch)))
            for k, prob in enumerate(conf[row, : len(one.tokens)].tolist()):
                label = 1 if k < one.accepted else 0 if k == one.accepted else -1
                said.append((slot.number, k, prob, label))
    return Served(np.array(said), np.array(kept), seconds / steps)


class Budget:
    """vLLM's own allocation of a batch's drafts: how many by the confidences of the step before, which ones by the
    present ones; times in forwards of one token."""

    def __init__(self, draft: float, token: float, num_places: int):
        """draft: of a round's drafts. token: of every verified token more."""
        from vllm.v1.worker.gpu.spec_decode import adaptive_verification as engine

        self._assign, self._draft, self._token, self._steps = (
            engine._assign_draft_token_budget,
            draft,
            token,
            num_places,
        )
        self._engine, self._stale = engine, torch.ones(0)

    def __call__(self, conf: Tensor, index: Tensor, lengths: Tensor, num: int) -> tuple[Tensor, float]:
        by_place = torch.ones(int(index.max()) + 1, self._steps)
        by_place[index] = conf[:num]
        stale = self._stale if len(self._stale) else torch.ones_like(by_place)
        stale = torch.cat([stale, torch.ones(max(len(by_place) - len(stale), 0), self._steps)])
        budget = self._budget(stale, index, lengths)
        count = lengths.clone()
        if budget < int(lengths.sum()):
            if budget:
                self._assign(by_place, index, count, budget, self._steps)
            else:
                count.zero_()
        kept = stale.clone()
        kept[index] = by_place[index]
        self._stale = kept
        return count, self._draft + 1 + self._token * (num + int(count.sum()))

    def _budget(self, stale: Tensor, index: Tensor, lengths: Tensor) -> int:
        num, total = len(index), int(lengths.sum())
        ids = [str(n) for n in range(num)]
        state = SimpleNamespace(
            req_id_to_index=dict(zip(ids, index.tolist(), strict=True)),
            num_computed_tokens_np=np.zeros(len(stale), np.int32),
            prefill_len=SimpleNamespace(np=np.zeros(len(stale), np.int32)),
        )
        costs = np.full(num + 1, self._draft), 1 + self._token * np.arange(num + total + 1)
        manager = SimpleNamespace(
            cost_tables=costs, req_states=state, _stale_confidences=[SimpleNamespace(np=stale.numpy())], _stale_idx=0,
            num_speculative_steps=self._steps, _max_total_logits=1 << 30, num_bonus_tokens=1, _batch_budget=None,
        )  # fmt: skip
        drafts = {one: [0] * int(length) for one, length in zip(ids, lengths, strict=True)}
        scheduled = {one: 1 + len(tokens) for one, tokens in drafts.items()}
        return self._engine.AdaptiveVerificationManager.get_num_tokens(manager, scheduled, drafts) - num


def engine_estimator() -> type:
    """vLLM's own class, its kernels run by Triton's interpreter."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    import triton
    import triton.language
    import vllm.triton_utils

    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    return OnlineAcceptanceEstimator


def priors(trace: dict[str, Any], numbers: Sequence[int], concurrency: int) -> tuple[Start, Start]:
    """Fitted to all verdicts on these prompts: of all numbers, and of the log-odds of max q alone."""
    server, K = Server(trace, numbers, concurrency), trace["length"]
    seen, labels = [], []

    class Kept(ServedEstimator):
        def step(self, idx_mapping: Tensor, num_sampled: Tensor, num_rejected: Tensor) -> None:
            seen.append(self.features[idx_mapping, :, :NUM_FEATURES].clone())
            labels.append((num_sampled - 1, num_sampled - 1 + num_rejected, idx_mapping))
            super().step(idx_mapping, num_sampled, num_rejected)

    estimator = Kept(concurrency, K, CPU)
    estimator.attach(server.texts)
    serve(server, estimator, None)
    accepted, verified = (torch.cat([one[i] for one in labels]) for i in (0, 1))
    features = torch.cat(seen)
    alone = torch.stack([features[..., 0], torch.zeros_like(features[..., 0])], -1)
    return fit_priors(features, accepted, verified), fit_priors(alone, accepted, verified)


def estimators(start: Start, alone: Start, K: int, rows: int) -> Iterator[tuple[str, Callable[[], Estimator]]]:
    theirs = engine_estimator()

    def begun() -> Estimator:
        """vLLM's, which begins at what one feature says."""
        made = theirs(rows, K, CPU)
        made.slope.fill_(alone.weights[0])
        made.intercepts.copy_(alone.tensors(K)[1])
        return made

    yield "vLLM's own", lambda: theirs(rows, K, CPU)
    yield "vLLM's own, from our priors of one number", begun
    yield "ours, no repetitions", partial(ServedEstimator, rows, K, CPU, repeats=False)
    yield "ours, no repetitions, with priors", partial(ServedEstimator, rows, K, CPU, alone, repeats=False)
    yield "ours", partial(ServedEstimator, rows, K, CPU)
    yield "ours, with priors", partial(ServedEstimator, rows, K, CPU, start)


def interval(values: Sequence[float]) -> str:
    return "({:+.4f} to {:+.4f})".format(*np.percentile(values, [2.5, 97.5]))


def auc_of(served: Served, weight: np.ndarray | None = None) -> float:
    reached = served.said[:, 3] >= 0
    prob, label = (torch.from_numpy(served.said[reached, column].copy()) for column in (2, 3))
    return float(soft_label_auc(prob, label, None if weight is None else torch.from_numpy(weight[reached])))


def gain_in_auc(mine: Served, base: Served, rng: np.random.Generator) -> str:
    """Over the other's, with its interval over prompts."""
    names, inverse = np.unique(mine.said[:, 0].astype(int), return_inverse=True)
    gains = []
    for _ in range(RESAMPLES if mine is not base else 1):
        weight = rng.multinomial(len(names), np.full(len(names), 1 / len(names)))[inverse].astype(float)
        gains.append(auc_of(mine, weight) - auc_of(base, weight))
    return f"{auc_of(mine) - auc_of(base):+.4f} {interval(gains)}"


def faster(mine: Served, base: Served) -> str:
    """Tokens by time over the other's."""
    parts = [
        (Resamples(one.kept[:, 0].astype(int).tolist(), 0), one.kept) for one in (mine, base)
    ]  # the same seed and prompts: paired
    rates = [drawn.sums(kept[:, 1]) / drawn.sums(kept[:, 2]) for drawn, kept in parts]
    mean = [kept[:, 1].sum() / kept[:, 2].sum() for _, kept in parts]
    low, high = np.percentile(rates[0] / rates[1] - 1, [2.5, 97.5])
    return f"{100 * (mean[0] / mean[1] - 1):+.2f} % ({100 * low:+.2f} to {100 * high:+.2f})"


def replay(args: argparse.Namespace) -> None:
    for path in args.traces:
        trace = torch.load(path, weights_only=True)
        K, numbers = trace["length"], range(len(trace["requests"]))
        start, alone = priors(trace, numbers[1::2], args.concurrency)
        print(f"\n{path}: weights {[round(w, 3) for w in start.weights]}, {[round(b, 2) for b in start.intercepts]}")
        base: tuple[Served, Served] | None = None
        for name, make in estimators(start, alone, K, args.concurrency):
            found = []
            for admit in (None, Budget(args.draft, args.token, K)):
                server, estimator = Server(trace, numbers[::2], args.concurrency), make()
                if hasattr(estimator, "attach"):
                    estimator.attach(server.texts)
                found.append(serve(server, estimator, admit))
            base = base or (found[0], found[1])
            print(f"{name:42} {line_of(found[0], found[1], base)}", flush=True)


def line_of(full: Served, trimmed: Served, base: tuple[Served, Served]) -> str:
    """full: all drafted tokens were verified."""
    reached = full.said[full.said[:, 3] >= 0]
    prob, label = torch.from_numpy(reached[:, 2].copy()), torch.from_numpy(reached[:, 3].copy())
    rate = trimmed.kept[:, 1].sum() / trimmed.kept[:, 2].sum()
    text = f"AUC {auc_of(full):.4f} {gain_in_auc(full, base[0], np.random.default_rng(0))}"
    text += f", ECE {float(expected_calibration_error(prob, label)):.4f}"
    text += f", log-loss {float(torch.nn.functional.binary_cross_entropy(prob, label)):.4f}"
    text += f", tokens by time {rate:.3f} {faster(trimmed, base[1])}"
    return f"{text}, {1e6 * full.seconds_a_step:.0f} us a step"


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("trace", type=Path)
    for name in ("--target", "--draft", "--prompts"):
        recording.add_argument(name, required=True)
    recording.add_argument("--temperature", type=float, default=0.0)
    recording.add_argument("--length", type=int, default=7)
    recording.add_argument("--limit", type=int, default=80)
    recording.set_defaults(run=record)
    replaying = commands.add_parser("replay")
    replaying.add_argument("traces", nargs="+", type=Path)
    replaying.add_argument("--concurrency", type=int, default=8)
    replaying.add_argument(
        "--draft", type=float, default=0.5, help="time of a round's drafts, by a forward of one token"
    )
    replaying.add_argument("--token", type=float, default=0.02, help="of every verified token more")
    replaying.set_defaults(run=replay)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()

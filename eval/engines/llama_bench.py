"""Seconds of a round of llama.cpp, and the draft lengths and thresholds that pay by them.

`llama-bench` times the target's calls by the tokens that they read. It cannot load a head without its target, so the
seconds of a drafted token are those that the server counts in a few answers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.console import log_note
from draftsmith.data.engines.process import running
from draftsmith.eval.bootstrap import Floats, Resamples
from draftsmith.eval.costs import interpolate
from draftsmith.eval.engines.llamacpp import LlamaCppClient, ServedModels, server_words
from draftsmith.modules.formats.foreign import ForeignHead, detect
from draftsmith.modules.pretrained.directory import read_package
from draftsmith.modules.pretrained.gguf_writer import is_gguf_model
from draftsmith.modules.pretrained.reading import misfits
from draftsmith.modules.types import InputError

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # tokens read in one call
DEPTH = 128  # tokens before them
PASSES, REPEATS, NEW_TOKENS = 5, 5, 32
# Drafted tokens and the milliseconds of drafting them, in the server's log.
DRAFTED = re.compile(r"#gen tokens = +(\d+),.*dur\(b,g,a\) = [\d.]+, ([\d.]+),")
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of --spec-draft-p-min
BENCH_SHAPE = [{"n_prompt": int, "avg_ns": int}]


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of a round.

    verify: call of the target by the tokens that it reads, all of them scored. overhead_s: rest of a round without a
    draft: sampling, sending. step_s: call of the drafter. catch_up: a draft model reads what was verified, too; of a
    head's round this is a hundredth.
    """

    verify: Mapping[int, float]
    overhead_s: float = 0.0
    step_s: float = 0.0
    catch_up: Mapping[int, float] | None = None

    def at(self, num_drafted: float, num_steps: float) -> float:
        """Return the seconds of a round. num_steps: calls of the drafter, whose last token p-min may have refused."""
        read = num_drafted + 1
        seconds = interpolate(self.verify, read) + self.overhead_s + num_steps * self.step_s
        return seconds + (interpolate(self.catch_up, read) if self.catch_up and num_steps else 0.0)


def read_bench(text: str, sizes: Sequence[int]) -> dict[int, float]:
    """Return seconds by tokens read from the JSON of `llama-bench -n 0`; all `sizes` are among them.

    Raises:
        InputError: other content.
    """
    try:
        rows = json.loads(text)
    except ValueError:
        rows = text[:200]
    for found, expected in misfits(rows, BENCH_SHAPE):
        raise InputError("llama-bench", found, expected, "Build the pinned llama.cpp: `make engines ENGINES=llamacpp`.")
    seconds = {row["n_prompt"]: row["avg_ns"] / 1e9 for row in rows}
    if missing := set(sizes) - set(seconds):
        raise InputError("llama-bench", f"no time of {missing} tokens", "all sizes", "Build the pinned llama.cpp.")
    return seconds


def measure_costs(
    server: Path, target: Path, drafter: Path | None, prompts: Sequence[Sequence[int]], longest: int, threads: int
) -> RoundCosts:
    """Time calls of the target by `llama-bench`, and in turn answers of the server with and without the drafter.

    drafter: without one, drafts are free. prompts: token ids, for the server. longest: draft.

    Raises:
        InputError: no llama-bench beside llama-server, or it fails; a server that does not draft.
    """
    bench = server.with_name("llama-bench")
    if not bench.is_file():
        raise InputError("engine_path", f"no {bench}", "llama-bench beside it", "Run `make engines ENGINES=llamacpp`.")
    sizes = sorted({size for size in SIZES if size <= longest} | {longest + 1})
    # With embeddings every row is scored, as in verification; otherwise the last one alone.
    options = ["--threads", str(threads), "--n-prompt", ",".join(map(str, sizes)), "--n-gen", "0", "--embeddings", "1"]
    options += ["--n-depth", str(DEPTH), "--repetitions", str(REPEATS), "--output", "json"]
    files = {"target": target}
    servers: dict[str, tuple[ServedModels, list[str]]] = {}
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "log")
        if drafter is not None:
            whole = is_gguf_model(drafter)
            files |= {"drafter": drafter} if whole else {}
            kind = "simple" if whole else detect(ForeignHead.of(read_package(str(drafter)))).kind
            models = ServedModels(target, drafter, f"draft-{kind}")
            # The server counts its drafter's seconds, and says them at this level.
            log_options = ["--log-verbosity", "4", "--log-file", str(log)]
            servers = {"plain": (ServedModels(target), []), "drafting": (models, log_options)}
        context = max(map(len, prompts), default=0) + NEW_TOKENS + longest + 2
        clients = {}
        for name, (models, more) in servers.items():
            command = server_words(server, models, context, longest, threads=threads)
            clients[name] = LlamaCppClient(stack.enter_context(running([*command, *more], {})), NEW_TOKENS)
        calls: dict[str, list[dict[int, float]]] = {name: [] for name in files}
        plain: list[float] = []
        for number in range(PASSES):
            for name, file in files.items():
                words = [str(bench), "--model", str(file), *options]
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                if done.returncode:
                    found = f"{bench.name}: {done.stderr.strip()[-300:]}"
                    raise InputError("engine_path", found, "a benchmark that runs", "Check the file.")
                calls[name].append(read_bench(done.stdout, sizes))
            answers = {name: client.complete(prompts[number % len(prompts)]) for name, client in clients.items()}
            if servers:
                # The first token comes from reading the prompt.
                plain.append(answers["plain"].generation_s / max(answers["plain"].num_tokens - 1, 1))
            log_note(f"timed llama.cpp, {number + 1} of {PASSES}")
        told = DRAFTED.findall(log.read_text(errors="replace")) if log.is_file() else []
    curves = {
        name: {size: statistics.median(one[size] for one in timed) for size in sizes} for name, timed in calls.items()
    }
    verify = curves["target"]
    if drafter is None:
        return RoundCosts(verify)
    if not told or told[-1][0] == "0":
        raise InputError("draft", f"{drafter}, with which nothing was drafted", "a drafter", "Read the server's log.")
    drafted, drafting_ms = told[-1]  # since the start
    step_s = float(drafting_ms) / 1e3 / int(drafted)
    return RoundCosts(verify, max(statistics.median(plain) - verify[1], 0.0), step_s, curves.get("drafter"))


def cut_short(rounds: Sequence[Mapping[str, Any]], length: int, p_min: float) -> Floats:
    """Return sums of tokens, drafted tokens and drafter's calls of recorded rounds, had they ended by n-max and p-min.

    rounds: lines of trace.jsonl. llama.cpp ends a draft before the first token whose probability, of the ten most
    probable ones, is below p-min.
    """
    sums = np.zeros(3)
    for one in rounds:
        probs = one["q_top10"][:length]
        drafted = next((place for place, prob in enumerate(probs) if prob < p_min), len(probs))
        sums += (min(one["num_accepted"], drafted) + 1, drafted, min(drafted + 1, len(probs)))
    return sums


def chain_rows(
    costs: RoundCosts,
    longest: int,
    owners: Sequence[int] = (),
    tokens: Floats | None = None,
    rounds: Floats | None = None,
    traced: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return a row of every draft length, and one of its best threshold if that is better.

    Args:
        owners, tokens, rounds: [A], [A], [A, longest + 1], of `RoundCounts`; without them, costs alone.
        traced: rounds of `longest` drafted tokens with their probabilities.
    """
    plain_s = costs.at(0, 0)
    rows: list[dict[str, Any]] = []
    for length in range(1, longest + 1):
        ratio = costs.at(length, length) / plain_s
        row: dict[str, Any] = {"n_max": length, "p_min": 0.0, "round_ms": 1e3 * ratio * plain_s, "pays_above": ratio}
        rows.append(row)
        if tokens is None or rounds is None:
            continue
        resamples = Resamples(owners, 0)
        row["tau"] = float(tokens.sum() / rounds[:, length].sum())
        row["speedup"] = row["tau"] / ratio
        taus = resamples.sums(tokens) / resamples.sums(rounds[:, length])
        row["speedup_ci95"] = resamples.interval(functools.partial(np.divide, taus, ratio))
        if not traced:
            continue
        # Rounds that are cut begin elsewhere than real shorter ones, with p-min and without: the ratio counts.
        whole = cut_short(traced, length, 0.0)[0]
        cut = []
        for p_min in THRESHOLDS:
            emitted, drafted, steps = cut_short(traced, length, p_min)
            round_s = costs.at(drafted / len(traced), steps / len(traced))
            tau = row["tau"] * emitted / whole
            cut.append({"n_max": length, "p_min": p_min, "round_ms": 1e3 * round_s, "pays_above": round_s / plain_s})
            cut[-1] |= {"tau": tau, "speedup": tau * plain_s / round_s}
        best = max(cut, key=lambda each: each["speedup"])
        if best["speedup"] > row["speedup"]:
            rows.append(best)
    return rows

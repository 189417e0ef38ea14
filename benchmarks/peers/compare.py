"""speculators' trainer beside ours, on the same stored states: `python benchmarks/peers/compare.py --output DIR ...`.

Heads of one shape learn from the same rows, in packs of as many tokens, for as many CPU seconds or steps: of the steps
alone, one thread each, in turns. The cost of a step is measured first and steps are counted by it, so that each trainer
follows its own schedule to its end. Our decoder measures all heads on the target's answers to held-out prompts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import draftsmith
from draftsmith.benchmarks.measured import write_tables
from draftsmith.benchmarks.recipes import python
from draftsmith.data.console import Column, Table, format_interval, print_text
from draftsmith.data.engines.process import leave
from draftsmith.data.engines.served_target import load_target
from draftsmith.data.store.datasets import open_dataset
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.command import by_each
from draftsmith.eval.bench.replay import Replayed, make_drafters, read_recorded, replay_text
from draftsmith.eval.bench.results import Resamples
from draftsmith.eval.bench.runner import load_models
from draftsmith.launch.cli import main_of
from draftsmith.launch.commands import configure
from draftsmith.modules.drafters.method_names import parse_methods
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.types import InputError, check_range
from draftsmith.train.module import LitDrafter
from draftsmith.train.prepare import prepare

K, VAL_SHARE = 5, 0.02
WARM_UP, TIMED = 2, 10  # steps of a training whose cost is measured
TURN_S = 5.0
COUNTS = ("tokens", "calls")  # of a held-out answer
COLUMNS = (
    ("arm", "trainer"), ("seed", "seed"), ("steps", "steps", ",d"), ("tokens", "tokens", ",d"),
    ("cpu_s", "CPU s", ".0f"), ("step_s", "s a step", ".2f"), ("speed", "tokens a CPU s", ".0f"),
    ("peak_mb", "peak MB", ",.0f"), ("tau", "tau", ".3f"), ("tau_ci", "95 %"),
    ("difference", "ahead by", "+.3f"), ("difference_ci", "95 %"), ("won", "prompts"),
)  # fmt: skip
# The shape, as each side says it. {anchors}: blocks of a pack; ours counts them by text.
OUR_SHAPE = {
    "eagle3": "--version 3-norm --draft-vocab {vocab} --ttt-steps 3",
    "dspark": "--num-layers 5 --block 8 --markov-rank 256 --anchors {anchors} --loss-vocab {vocab}",
}
THEIR_SHAPE = {
    "eagle3": "--norm-before-fc --no-norm-output --no-norm-before-residual --full-attention-indices 0",
    "dspark": "--num-layers 5 --full-attention-indices 0 1 2 3 4 --block-size 8 --markov-rank 256"
    " --max-anchors {anchors}",
}
# speculators' defaults, in our words.
THEIR_RECIPE = "--lr 1e-3 --schedule linear --warmup-share 0.01 --clip 1 --betas 0.9 0.999 --optimizer {optimizer}"
THEIR_RECIPE += " --weight-decay {decay}"
# On a GPU speculators keeps its attention. Its fused loss fails there with torch 2.11.
OURS = {
    "cpu": "--precision 32 --dtype float32 --num-threads 1 --tau-prompts 0 --loggers csv",
    "cuda": "--precision bf16 --dtype bfloat16 --num-workers 4 --tau-prompts 0 --loggers csv",
}
THEIRS = {
    "cpu": "--num-workers 0 --draft-attn-impl sdpa --loss-implementation eager --hidden-states-dtype float32",
    "cuda": "--num-workers 4 --loss-implementation eager",
}
THEIR_QUIET = "--on-missing raise --log-freq 1000000 --checkpoint-freq 1000000 --no-resume-from-checkpoint"
ARMS = {
    "speculators": "its defaults, but Muon's iteration in float32",
    "draftsmith": "speculators' defaults",
}


@dataclass(frozen=True)
class CompareConfig:
    """Trains heads with speculators and with Draftsmith on the same states of a target, and measures their drafts. A
    command that was interrupted goes on when it is given again.

    Attributes:
        output: Directory that receives runs/, steps.json, compare.md and compare.json.
        target: Target, a directory or a GGUF file.
        features: Its states along greedy answers, that `data features --drafter eagle3` wrote.
        answers: Its greedy answers to held-out prompts, that `data responses` wrote.
        speculators: Python of an environment with speculators (make engines ENGINES=speculators).
        kind: Kind of the heads.
        optimizer: Of both.
        arms: What is trained, separated by commas: speculators, draftsmith. The first is the baseline.
        cpu_seconds: That each head is trained for.
        steps: Steps of each head, in the place of seconds.
        seeds: Of trainings, separated by commas.
        anchors: Blocks of a pack that DSpark learns from.
        pack: Tokens of a pack, which is a step.
        vocab: Tokens that EAGLE-3 drafts, and that our DSpark learns from.
        device: cpu or cuda.
        limit: Only the first so many held-out prompts; 0 takes all.
        states: Directory of the states as speculators reads them, which several outputs may share. Default:
            output/states.
    """

    output: Path
    target: str
    features: Path
    answers: Path
    speculators: Path = Path(".engines/speculators/bin/python")
    kind: Literal["eagle3", "dspark"] = "eagle3"
    optimizer: Literal["adamw", "muon"] = "muon"
    arms: str = "speculators,draftsmith"
    cpu_seconds: float = 120.0
    steps: int = 0
    seeds: str = "0"
    anchors: int = 64
    pack: int = 1024
    vocab: int = 8192
    device: Literal["cpu", "cuda"] = "cpu"
    limit: int = 0
    states: Path | None = None

    def __post_init__(self) -> None:
        check_range("anchors", self.anchors, 1)
        check_range("steps", self.steps, 0)
        if unknown := sorted(set(self.names) - ARMS.keys()):
            raise InputError("arms", ", ".join(unknown), f"some of {', '.join(ARMS)}", "Change it.")

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.arms.split(",")]

    @property
    def numbers(self) -> list[int]:
        return [int(seed) for seed in self.seeds.split(",")]

    @property
    def their_states(self) -> Path:
        return self.states or self.output / "states"

    @cached_property
    def layers(self) -> list[str]:
        """The layers of the target that all heads read."""
        *layers, _ = Manifest.read(self.features).identity["target"]["layers"].split(",")
        return layers

    @cached_property
    def text_tokens(self) -> float:
        return float(np.mean(open_dataset(self.features).lengths))

    def ours(self, steps: int, seed: int, output: Path) -> list[str]:
        """Return the options of `draftsmith train KIND`."""
        by_text = max(1, round(self.anchors * self.text_tokens / self.pack))
        decay = 0.1 if self.optimizer == "muon" else 0.01
        words = ["--data", str(self.features), "--target", self.target, *OURS[self.device].split()]
        words += ["--val-share", str(VAL_SHARE), "--tokens-per-batch", str(self.pack), "--layers", *self.layers]
        words += ["--device", self.device]
        words += ["--config", "eagle3-speculators"] if self.kind == "eagle3" else []
        words += THEIR_RECIPE.format(optimizer=self.optimizer, decay=decay).split()
        words += OUR_SHAPE[self.kind].format(anchors=by_text, vocab=self.vocab).split()
        words += ["--max-steps", str(steps), "--val-every", str(steps), "--seed", str(seed)]
        return [*words, "--output", str(output)]

    def theirs(self, steps: int, seed: int, output: Path) -> list[str]:
        """Return the options of `speculators train`."""
        states = self.their_states
        rows = json.loads((states / "rows.json").read_text())
        words = ["--speculator-type", self.kind, "--verifier-name-or-path", str(Checkpoint(self.target).directory)]
        words += [
            "--data-path",
            str(states),
            "--train-data-ratio",
            str(rows["ratio"]),
            "--total-seq-len",
            str(self.pack),
        ]
        words += [
            "--target-layer-ids",
            *self.layers,
            "--mask-token-id",
            str(rows["vocab_size"] - 1),
            *THEIR_QUIET.split(),
        ]
        words += THEIRS[self.device].split()
        words += THEIR_SHAPE[self.kind].format(anchors=self.anchors).split()
        if self.kind == "eagle3" and (states / "d2t.npy").exists():
            words += ["--d2t-path", str(states / "d2t.npy"), "--t2d-path", str(states / "t2d.npy")]
        words += ["--optimizer", self.optimizer, "--save-path", str(output / "checkpoints")]
        words += ["--log-dir", str(output / "logs")]
        return [*words, "--max-steps", str(steps), "--seed", str(seed)]

    def training(self, name: str, steps: int, seed: int, output: Path) -> list[str]:
        """Return the command of an arm's training, which leaves output/record.json at its end."""
        record, here = str(output / "record.json"), "draftsmith.benchmarks.peers"
        if name == "draftsmith":
            words = self.ours(steps, seed, output / "run")
            return [sys.executable, "-m", f"{here}.train_draftsmith", record, self.kind, *words]
        words = self.theirs(steps, seed, output)
        return [str(self.speculators), "-m", f"{here}.train_speculators", record, str(output / "theirs"), *words]


@sole_writer()
def run(config: CompareConfig) -> Path:
    """Write the states, measure the steps, train and decode what is missing, write the table; return compare.json."""
    if not (config.their_states / "rows.json").exists():
        write_states(config, config.their_states)
    steps = steps_of(config)
    every = [(name, seed) for seed in config.numbers for name in config.names]
    runs = {(name, seed): config.output / "runs" / f"{name}-{seed}-{steps[name]}" for name, seed in every}
    for seed in config.numbers:
        in_turns(
            {path: config.training(name, steps[name], own, path) for (name, own), path in runs.items() if own == seed}
        )
    for (name, _), path in runs.items():
        if name == "speculators" and not (path / "head").exists():
            words = ["import", str(path / "theirs"), "--target", config.target, "--output", str(path / "head")]
            python("-m", "draftsmith", *words)
    measure(config, [head_of(directory) for directory in runs.values()])
    return write_report(config, runs)


def head_of(directory: Path) -> Path:
    return directory / "run" / "last" if (directory / "run").exists() else directory / "head"


# -- states


def write_states(config: CompareConfig, states: Path) -> None:
    """Write the features as speculators reads them, the rows of our validation last, and our draft vocabulary.

    Its last state is the one before the final norm, ours the one behind it, y: y / w, with the norm's weight w, has the
    same normed state, as its mean square is 1.
    """
    import datasets

    make_directory(states / "hidden_states")
    _, training = configure("train eagle3", dataclasses.replace(config, kind="eagle3").ours(1, 0, states))
    assert training is not None  # only of words that ask for help
    module, data = prepare(training)
    assert isinstance(module, LitDrafter)
    order = [*data.train.indices.tolist(), *data.val.indices.tolist()]
    features, width = open_dataset(config.features), module.target.info.hidden_size
    weights, rows = Checkpoint(config.target).read_tensors(("norm.",)), list[dict[str, Any]]()
    for number, index in enumerate(order):
        item = features[index]
        hidden = item["features"].float().view(len(item["input_ids"]), -1, width)  # [T, 4, H]
        hidden[:, -1] /= weights["norm.weight"].float()
        stored = {"hidden_states": hidden.contiguous(), "token_ids": item["input_ids"]}
        save_file(stored, states / "hidden_states" / f"hs_{number}.safetensors")
        mask = item["loss_mask"].int().tolist()
        rows.append({"input_ids": item["input_ids"].tolist(), "loss_mask": mask, "seq_len": len(mask)})
    table = datasets.Dataset.from_list(rows)
    table.set_format("torch")
    table.save_to_disk(states)
    d2t, vocab_size = cast(Tensor, module.head.d2t), module.target.info.vocab_size
    if len(d2t) < vocab_size:
        np.save(states / "d2t.npy", (d2t - torch.arange(len(d2t))).numpy())
        np.save(states / "t2d.npy", np.isin(np.arange(vocab_size), d2t.numpy()))
    about = {"texts": len(rows), "tokens": sum(row["seq_len"] for row in rows), "vocab_size": vocab_size}
    about["answer_tokens"] = sum(sum(row["loss_mask"]) for row in rows)
    # It cuts at the whole number below rows * ratio.
    about["ratio"] = (len(data.train) + 0.5) / len(rows)
    write_json(states / "rows.json", about)


# -- training


def steps_of(config: CompareConfig) -> dict[str, int]:
    """Return each arm's steps. Of a budget of seconds the cost of a step is measured once, in trainings in turns."""
    if config.steps:
        return dict.fromkeys(config.names, config.steps)
    runs = {name: config.output / "costs" / name for name in config.names}
    in_turns({path: config.training(name, WARM_UP + TIMED, 0, path) for name, path in runs.items()})
    costs = {name: statistics.fmean(record_of(path)["seconds"][WARM_UP:]) for name, path in runs.items()}
    return {name: max(1, round(config.cpu_seconds / cost)) for name, cost in costs.items()}


def record_of(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((directory / "record.json").read_text())
    return record


def in_turns(jobs: Mapping[Path, list[str]]) -> None:
    """Run the trainings that have not finished in these directories, one at a time for TURN_S seconds each.

    Raises:
        InputError: one failed, with the end of its output.
    """
    left: dict[Path, subprocess.Popen] = {}
    # Else a stopped training would outlive us.
    previous = signal.signal(signal.SIGTERM, leave)
    with tempfile.TemporaryDirectory(prefix="draftsmith-peers-") as site:
        # Where another environment finds this package.
        (Path(site) / "draftsmith").symlink_to(Path(draftsmith.__file__).parent)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": site}
        try:
            for directory, words in jobs.items():
                if (directory / "record.json").exists():
                    continue
                shutil.rmtree(directory, ignore_errors=True)
                with (make_directory(directory) / "log.txt").open("w") as log:
                    left[directory] = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
                left[directory].send_signal(signal.SIGSTOP)
            while left:
                for directory, process in list(left.items()):
                    if has_ended(process, directory):
                        del left[directory]
        finally:
            for process in left.values():
                process.kill()
            signal.signal(signal.SIGTERM, previous)


def has_ended(process: subprocess.Popen, directory: Path) -> bool:
    """Let a stopped training go on for a turn; return whether it ended. Raises InputError if it failed."""
    process.send_signal(signal.SIGCONT)
    try:
        code = process.wait(TURN_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGSTOP)
        return False
    if code or not (directory / "record.json").exists():
        found = f"exit code {code} in {directory}: {(directory / 'log.txt').read_text()[-2000:]}"
        raise InputError("arms", found, "0", "Give the command again: what is done stays.")
    print_text(f"trained: {directory}")
    return True


# -- measuring


def measure(config: CompareConfig, heads: Sequence[Path]) -> None:
    """Write tau.json beside each head that has none: tokens and target calls of every held-out answer."""
    heads = [head for head in heads if not (head.parent / "tau.json").exists()]
    if not heads:
        return
    words = ["--target", config.target, "--replay", str(config.answers), "--dtype", "float32"]
    words += ["--head", ",".join(map(str, heads)), "--methods", f"{config.kind}:k={K}", "--limit", str(config.limit)]
    _, bench = configure("eval bench", [*words, "--num-threads", "1", "--output", str(config.output)])
    assert bench is not None  # only of words that ask for help
    checkpoint = Checkpoint(config.target)
    texts, params = read_recorded(bench, checkpoint)
    torch.set_num_threads(1)
    named = by_each({item.label: item for item in parse_methods(bench.methods)}, bench.paths)
    target = load_target(checkpoint, **bench.loading)
    loading = {name: value for name, value in bench.loading.items() if name != "server"}
    models = load_models(named, bench.paths, max(len(text.ids) for text in texts), params, target, **loading)
    drafters, walks = make_drafters(named, models), {item.label: list[Replayed]() for item in named}
    for number, text in enumerate(texts):
        replay_text(target, number, text, params, drafters, walks)
    for head, own in zip(heads, walks.values(), strict=True):
        counts = [(one.walk.num_tokens, float(one.walk.calls[-1])) for one in own]
        write_json(head.parent / "tau.json", [dict(zip(COUNTS, row, strict=True)) for row in counts])


def compared(runs: Sequence[Path], base: Sequence[Path]) -> dict[str, Any]:
    """Return tau of an arm's trainings together, and its difference from the base's on the same prompts.

    A prompt is resampled with its answers under all seeds of both arms.
    """
    arms = ([json.loads((head_of(path).parent / "tau.json").read_text()) for path in own] for own in (runs, base))
    rows, others = (list(itertools.chain(*own)) for own in arms)
    owners = [number for _ in runs for number in range(len(rows) // len(runs))]
    tokens, calls = (np.array([row[name] for row in rows], float) for name in COUNTS)
    base_calls = np.array([row["calls"] for row in others], float)
    tau, base_tau = (float(tokens.sum() / own.sum()) for own in (calls, base_calls))
    resamples = Resamples(owners, 0)
    drawn, base_drawn = (resamples.sums(tokens) / resamples.sums(own) for own in (calls, base_calls))
    return {
        "tau": tau,
        "tau_ci95": resamples.interval(drawn),
        "difference": tau - base_tau,
        "difference_ci95": resamples.interval(drawn - base_drawn),
        "ahead": int((np.bincount(owners, calls) < np.bincount(owners, base_calls)).sum()),
        "prompts": len(set(owners)),
    }


def write_report(config: CompareConfig, runs: Mapping[tuple[str, int], Path]) -> Path:
    """Write compare.md and compare.json: a row for each training, and for all of an arm where there are several."""
    rows, base = list[dict[str, Any]](), config.names[0]
    for name in config.names:
        for seeds in [[seed] for seed in config.numbers] + [config.numbers] * (len(config.numbers) > 1):
            records = [record_of(runs[name, seed]) for seed in seeds]
            seconds = [value for record in records for value in record["seconds"]]
            tokens = sum(sum(record["tokens"]) for record in records)
            row = {"arm": name, "seed": ", ".join(map(str, seeds)), "steps": len(seconds), "tokens": tokens}
            row |= {"cpu_s": sum(seconds), "step_s": statistics.median(seconds), "speed": tokens / sum(seconds)}
            row["peak_mb"] = max(record["peak_mb"] for record in records)
            rows.append(row | compared(*([runs[arm, seed] for seed in seeds] for arm in (name, base))))
    return write_tables(config, config.output / "compare.json", "rows", rows, [table_of(config, rows)])


def table_of(config: CompareConfig, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns, shown = [Column(*words) for words in COLUMNS], []
    for row in rows:
        intervals = {f"{key}_ci": format_interval(row[f"{key}_ci95"], between=" to ") for key in ("tau", "difference")}
        shown.append({**row, **intervals, "won": f"{row['ahead']} of {row['prompts']}"})
    about = ", ".join(f"{name}: {ARMS[name]}" for name in config.names)
    budget = f"{config.steps} steps" if config.steps else f"{config.cpu_seconds:g} CPU seconds"
    return Table("compare", f"{config.kind}, {config.optimizer}, {budget}", columns, shown, f"{about}.")


if __name__ == "__main__":
    sys.exit(main_of(CompareConfig, run))

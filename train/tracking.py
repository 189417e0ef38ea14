"""Logs of a training: metrics.csv, Weights & Biases by Lightning's logger, and the cost of the steps."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import os
import re
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.loggers.wandb import WandbLogger
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.data.store.manifest import resolved
from draftsmith.modules.pretrained.files import append, copy_file, make_directory, write_text
from draftsmith.modules.pretrained.reading import metric_rows, read_object
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig, has_wandb_key
from draftsmith.train.data import MicroBatch
from draftsmith.train.metrics import gather_rows, rank, say_on_rank_zero
from draftsmith.train.strategies import process_memory

# Metrics whose best value is kept in a run's summary, beside the last value of every other.
BEST = {f"val/{name}": "max" for name in ("tau", "top1", "accepted", "auc")}
BEST |= {"val/loss": "min", "val/kl": "min"}
PROJECT = "draftsmith"  # unless WANDB_PROJECT names another
# Only what the run itself logs: no console text, machine load, git state, code, host name, paths or package list.
SETTINGS: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "init_timeout": 20,  # seconds
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "host": "",
    "disable_git": True,
    "save_code": False,
}


class CsvLogger(Logger):
    """Rows of metrics, appended to `path`; a new metric adds a column.

    Rows after `resumed_step` of an earlier run are dropped: the resumed run writes them again. (Lightning's own CSV
    logger deletes the whole file when a run is resumed.)
    """

    def __init__(self, path: Path, resumed_step: int = 0):
        super().__init__()
        self.path = path
        self._rows: list[dict[str, str]] = []
        self._columns = ["step"]
        # The file holds all rows.
        self._complete = False
        if resumed_step and path.exists():
            self._rows = [row for row in metric_rows(path) if int(row["step"]) <= resumed_step]
            self._columns = list(dict.fromkeys(name for row in self._rows for name in row)) or ["step"]

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml lies beside the CSV file."""

    def logged(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, metrics) of every row so far."""
        for row in self._rows:
            yield int(row["step"]), {k: float(v) for k, v in row.items() if k and k != "step" and v}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": str(step), **{name: f"{value:.8g}" for name, value in metrics.items()}}
        # A CSV file has one header: a new column means writing it anew.
        new_columns = [name for name in row if name not in self._columns]
        self._rows.append(row)
        self._columns += new_columns
        # A full disk may cut the file short: it is incomplete until the write has succeeded.
        appends, self._complete = self._complete and not new_columns, False
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        if appends:
            writer.writerow(row)
            append(self.path, text.getvalue())
        else:
            writer.writeheader()
            writer.writerows(self._rows)
            write_text(self.path, text.getvalue())
        self._complete = True


class TrackedRun(WandbLogger):
    """Lightning's logger over a Weights & Biases run that ends with the training. (Lightning leaves its run open, and
    the next training of the process would log into it.)"""

    def __init__(self, run: Any):
        super().__init__(experiment=run)
        self.run, self._open = run, True
        for name, best in BEST.items():
            run.define_metric(name, step_metric="trainer/global_step", summary=best)

    def log_head(self, directory: Path) -> None:
        """Log a head directory, with its card as the description, as the next version of the run's artifact."""
        import wandb

        manifest = read_object(directory / "manifest.json", {})
        metadata = {key: manifest.get(key) for key in ("step", "metrics", "inputs", "models", "git_commit")}
        text, name = (directory / "README.md").read_text("utf-8"), re.sub(r"[^A-Za-z0-9_.-]+", "-", self.run.name)
        artifact = wandb.Artifact(name, type="model", description=text, metadata=metadata)
        # Files are referenced, not copied: an offline run reads them when it is uploaded, and refuses changed ones. By
        # then `eval bench --card` may have written the card anew, so that a copy is referenced.
        card = Path(self.run.dir).resolve().parent / "head-card.md"
        copy_file(directory / "README.md", card)
        for path in sorted(directory.resolve().iterdir()):
            source = card if path.name == "README.md" else path
            artifact.add_file(str(source), name=path.name, policy="immutable", skip_cache=True)
        self.run.log_artifact(artifact, aliases=["best", f"step-{metadata['step']}"])

    def finalize(self, status: str) -> None:
        """End the run; log the command that uploads an offline one."""
        if not self._open:
            return
        self._open, files = False, Path(self.run.dir).resolve().parent
        self.run.finish(exit_code=0 if status == "success" else 1)
        if self.run.offline:
            upload = f"Upload a run's last directory, which holds all: {shlex.join(['wandb', 'sync', str(files)])}"
            say_on_rank_zero(f"Weights & Biases: logged offline. {upload}")


def wandb_mode(config: TrainConfig) -> str:
    """Return online or offline, or an empty string if Weights & Biases is off: not asked for, without a key, or by its
    own variable."""
    mode = os.environ.get("WANDB_MODE", "")
    if not {"wandb", "wandb-offline"} & set(config.loggers) or mode == "disabled":
        return ""
    if "wandb-offline" in config.loggers or mode in ("offline", "dryrun"):
        return "offline"
    return "online" if has_wandb_key() else ""


def check_loggers(config: TrainConfig) -> None:
    """Raise InputError if Weights & Biases refuses a name: its own errors come late, as tracebacks."""
    if not wandb_mode(config):
        return
    import wandb

    for name, value in {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}.items():
        try:
            wandb.Settings().update_from_env_vars({name: value})
        except Exception as error:  # the client has a family of errors, and pydantic's
            found, reason = "a value" if "KEY" in name else repr(value), " ".join(str(error).split())
            raise InputError(name, found, f"one that Weights & Biases takes ({reason})", "Change it.") from error


def start_run(
    config: TrainConfig, job: str, table: CsvLogger, resumed: bool, about: dict[str, Any]
) -> TrackedRun | None:
    """Start a Weights & Biases run, offline too if online does not start. Return None if it is off (`wandb_mode`).

    The files lie in output/wandb; `wandb sync` uploads an offline run later. A resumed training keeps the run's id. If
    the server does not bring back what was logged before, `table` is logged again: uploading a second offline directory
    of one run replaces the first, so the last one has to hold everything.
    """
    mode = wandb_mode(config)
    if not mode:
        if "wandb" in config.loggers and os.environ.get("WANDB_MODE") != "disabled":
            hint = "`wandb login` logs online, --loggers wandb-offline into files"
            say_on_rank_zero(f"Weights & Biases: off, no key was found ({hint})")
        return None
    import wandb

    id_file = config.output / "wandb_id.txt"
    # A new training is a new run.
    if not resumed or not id_file.exists():
        write_text(id_file, uuid.uuid4().hex[:12] + "\n")
    # A directory's or repository's last name; an acceptance head reads the draft's states.
    model = Path(getattr(config, "head", None) or getattr(config, "target", None) or "").name[:64]
    names = [name for name in (job, model) if name]
    options: dict[str, Any] = {"job_type": job, "tags": names, "project": os.environ.get("WANDB_PROJECT", PROJECT)}
    options |= {"name": " ".join([*names, config.output.name]), "dir": str(config.output)}
    options["id"] = id_file.read_text().strip()
    start, run = functools.partial(wandb.init, **options, config=about, settings=wandb.Settings(**SETTINGS)), None
    if mode == "online":
        try:
            run = start(mode="online", resume="allow" if resumed else None)
        except Exception as error:  # the client has a family of errors for network, key and server
            reason = f"did not start online ({type(error).__name__}), so this run is logged offline"
            say_on_rank_zero(f"Weights & Biases: {reason}")
            # Otherwise the next init waits for the failed one.
            wandb.teardown()
    logger = TrackedRun(start(mode="offline") if run is None else run)
    # An offline run starts empty.
    if resumed and not logger.run.resumed:
        for step, metrics in table.logged():
            logger.log_metrics(metrics, step)
    return logger


def make_loggers(
    config: TrainConfig, job: str, resumed_step: int, made_from: Mapping[str, Any] | None = None
) -> list[Logger]:
    """Return the loggers of a training, the CSV file first so that no other logger's error costs it; none on ranks
    above 0.

    made_from: logged beside the config: hashes of inputs and models, packages, git commit.

    Raises:
        InputError: as `check_loggers`.
    """
    check_loggers(config)
    if rank():
        return []
    make_directory(config.output)
    about = {**resolved(config), "made_from": dict(made_from or {})}
    table = CsvLogger(config.output / "metrics.csv", resumed_step)
    run = start_run(config, job, table, bool(resumed_step), about)
    return [table] if run is None else [table, run]


# -- cost of training steps


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far in 1e9 bytes: torch's on a GPU, else that of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return process_memory() / 1e9


@dataclass
class StepWindow:
    """Work of one rank since the last log. slots: tokens of its batches, padding included. waited_s: the part of
    worked_s without a batch to work on."""

    steps: int = 0
    tokens: int = 0
    slots: int = 0
    flops: float = 0.0
    waited_s: float = 0.0
    worked_s: float = 0.0


class Telemetry:
    """Work and time of a rank's steps: tokens from shapes, time from the host, without validation and saving.

    FLOPs are those that torch counts in the first step, and in the first one behind each validation, in proportion to
    the batches' slots: forward, backward and the frozen model where it runs in the step, as the kernels compute them.
    Nothing here waits for a device. The time of a window is right on a GPU too: the losses are read back when a window
    ends, and that waits for everything before. count_flops: None for GPUs only.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, count_flops: bool | None = None):
        self._clock, self._count_flops = clock, count_flops
        self._window, self._mark = StepWindow(), 0.0
        self.flops_of_slot: float | None = None

    def start(self, device: torch.device) -> None:
        """Start the clock."""
        if self._count_flops is None:
            self._count_flops = device.type == "cuda"
        self.resume()

    @contextmanager
    def step(self, parts: Sequence[MicroBatch]) -> Iterator[None]:
        """Measure a step."""
        window = self._window
        # The time since the last step was spent waiting for this one's batch.
        window.waited_s += self._pass()
        # With padding: the size of the first tensor, the ids.
        slots = sum(next(v.numel() for v in vars(part.data).values() if isinstance(v, Tensor)) for part in parts)
        counter = FlopCounterMode(display=False) if self._count_flops and self.flops_of_slot is None else None
        with counter or nullcontext():
            yield
        if counter is not None:
            self.flops_of_slot = counter.get_total_flops() / slots
        window.tokens += sum(sum(part.real_lengths) for part in parts)
        window.slots += slots
        window.flops += slots * (self.flops_of_slot or 0.0)
        self._pass()
        window.steps += 1

    def count_again(self) -> None:
        """Count the FLOPs of the next step: the number of passes may change in the course of a training."""
        self.flops_of_slot = None

    def resume(self) -> None:
        """Start to count time again, after the work between steps."""
        self._mark = self._clock()

    def take(self, device: torch.device) -> dict[str, float]:
        """Return the numbers of all ranks since the last call. Every rank must call it, after reading the losses back.

        steps_per_s, tokens_per_s (without padding, all ranks together), data_wait (share of the time), real_tokens
        (share of slots without padding), memory_gb (largest of any rank so far), and tflops (model TFLOP/s of a
        device; over its peak by the data sheet they are the model FLOPs utilization).
        """
        self._pass()
        window, self._window = self._window, StepWindow()
        # One gather for all numbers.
        numbers = [*dataclasses.astuple(window), peak_memory_gb(device)]
        rows = gather_rows(torch.tensor([numbers], dtype=torch.float64, device=device))  # [ranks, 7]
        steps, tokens, slots, total_flops, waited, worked, _ = rows.sum(0).tolist()
        if not worked or not slots:
            return {}
        # Ranks work at the same time: times are averaged, work is summed.
        metrics = {
            "steps_per_s": steps / worked,
            "tokens_per_s": tokens * len(rows) / worked,
            "data_wait": waited / worked,
            "real_tokens": tokens / slots,
            "memory_gb": float(rows[:, 6].max()),
        }
        return metrics | ({"tflops": total_flops / worked / 1e12} if total_flops else {})

    def _pass(self) -> float:
        """Count the time since the last event as work, and return it in seconds."""
        now = self._clock()
        passed, self._mark = now - self._mark, now
        self._window.worked_s += passed
        return passed

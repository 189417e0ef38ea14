"""Where numbers go (`--track csv wandb tensorboard`).

A CSV file always, as a continued run takes its curve from it; Weights & Biases where it can be reached, offline where
it cannot.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger

from draftsmith.data.store.files import append, make_directory, write_text
from draftsmith.data.store.manifest import MANIFEST, resolved
from draftsmith.data.store.reading import metric_rows
from draftsmith.data.tracking import (
    configured,
    data_artifact,
    finish_wandb,
    head_artifact,
    start_wandb,
    switched_off,
    use_artifact,
)
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.metrics import is_first_process

# What the summary of a run keeps of a metric, beside the last value of every other.
BEST = {"val/tau": "max", "val/top1": "max", "val/accepted": "max", "val/auc": "max", "val/loss": "min"}
# (step, metrics) of what a continued run logged before, oldest first.
Past = Callable[[], Iterable[tuple[int, Mapping[str, float]]]]


class CsvLogger(Logger):
    """One row for each call, appended to `path`; a new metric adds a column.

    Rows after `resumed_step` of an earlier run are dropped: the continued run writes them again. (Lightning's own CSV
    logger deletes the whole file when a run is continued.)
    """

    def __init__(self, path: Path, resumed_step: int = 0):
        super().__init__()
        self.path = path
        self._rows: list[dict[str, str]] = []
        self._columns = ["step"]
        self._whole = False  # the file holds all rows
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
        """The resolved config lies beside the CSV file, as config.yaml."""

    def kept(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, metrics) of every row there is."""
        for row in self._rows:
            yield int(row["step"]), {k: float(v) for k, v in row.items() if k and k != "step" and v}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": str(step), **{name: f"{value:.8g}" for name, value in metrics.items()}}
        new = [name for name in row if name not in self._columns]
        self._rows.append(row)
        self._columns += new
        appends, self._whole = self._whole and not new, False  # a full disk may cut the file short
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        if appends:
            writer.writerow(row)
            append(self.path, text.getvalue())
        else:
            writer.writeheader()
            writer.writerows(self._rows)
            write_text(self.path, text.getvalue())
        self._whole = True


class WandbLogger(Logger):
    """A Weights & Biases run that ends with the training. (Lightning's own leaves it open, so that the next training of
    the same process would go on writing into it.)"""

    def __init__(self, run: Any, say: Callable[[str], None] = lambda text: None):
        super().__init__()
        self._run, self._say, self._open = run, say, True
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step")
        for name, best in BEST.items():
            run.define_metric(name, step_metric="trainer/global_step", summary=best)

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def version(self) -> str:
        return self._run.id

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved config was given when the run began."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._run.log({**metrics, "trainer/global_step": step})

    def log_head(self, directory: Path) -> None:
        """A head directory as the next version of the artifact `JOB-RUN`."""
        import wandb

        card = Path(self._run.dir).resolve().parent / "head-card.md"
        artifact = head_artifact(wandb, self._run.name, directory, card)
        self._run.log_artifact(artifact, aliases=["best", f"step-{artifact.metadata['step']}"])

    def log_inputs(self, directories: Iterable[Path]) -> None:
        """What the head is made from, in the lineage of its artifact."""
        import wandb

        for directory in directories:
            try:
                use_artifact(self._run, data_artifact(wandb, directory))
            except Exception as error:  # of the network or the server: the training does not need it
                self._say(f"Weights & Biases: {directory} is not in the head's lineage ({type(error).__name__})")

    def finalize(self, status: str) -> None:
        if not self._open:
            return
        self._open = False
        finish_wandb(self._run, self._say, exit_code=0 if status == "success" else 1)


class HeadArtifact(pl.Callback):
    """Gives Weights & Biases the head in `directory` once the training is complete: one version for a run, not one for
    every save."""

    def __init__(self, directory: Path):
        self._directory = directory

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        complete = trainer.global_step == pl_module.total_steps
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and complete and self._directory.is_dir():
                logger.log_head(self._directory)


def wandb_logger(
    config: TrainConfig, job: str, resumed: bool, say: Callable[[str], None], made_from: Mapping[str, Any], past: Past
) -> Logger | None:
    """Online with a key, offline where that is asked for; online that does not start falls back to offline. None when
    switched off, and by `auto` where nobody has set Weights & Biases up.

    The files lie in output/wandb; `wandb sync` uploads an offline run later. A continued training continues its run:
    the run's id is kept, and where the server does not bring back what was logged before, `past` is logged anew.
    (Uploading a second offline directory of one run replaces the first, so the last one has to hold everything.)
    """
    if "wandb" not in config.track or switched_off(config.wandb):
        return None
    if config.wandb == "auto" and not configured():
        say("Weights & Biases: off, no key was found (`wandb login` logs online, --wandb offline into files)")
        return None
    import wandb

    options: dict[str, Any] = {
        "project": config.project,
        "name": f"{job} {config.output.name}",
        "job_type": job,
        "group": config.group,
        "dir": str(config.output),
        "config": {**resolved(config), "made_from": dict(made_from)},
        "id": _run_id(config.output / "wandb_id.txt", resumed),
        "resume": "allow" if resumed else None,
    }
    run = start_wandb(wandb, config.wandb, options, say)
    logger = WandbLogger(run, say)
    logger.log_inputs(path for path in (config.data, config.val) if path is not None and (path / MANIFEST).is_file())
    if resumed and not run.resumed:
        for step, metrics in past():
            logger.log_metrics(metrics, step)
    return logger


def _run_id(path: Path, resumed: bool) -> str:
    if not resumed or not path.exists():
        write_text(path, uuid.uuid4().hex[:12] + "\n")
    return path.read_text().strip()


def tensorboard_logger(config: TrainConfig, resumed_step: int, made_from: Mapping[str, Any]) -> Logger:
    """Events in output/tensorboard. A continued run adds a file there that hides what follows its checkpoint."""
    purge: Any = resumed_step + 1 if resumed_step else None
    logger = TensorBoardLogger(config.output, name="", version="tensorboard", default_hp_metric=False, purge_step=purge)
    text = yaml.safe_dump({**resolved(config), "made_from": dict(made_from)}, sort_keys=False)
    logger.experiment.add_text("config", "\n".join("    " + line for line in text.splitlines()), resumed_step)
    return logger


def make_loggers(
    config: TrainConfig,
    job: str,
    resumed_step: int,
    say: Callable[[str], None],
    made_from: Mapping[str, Any] | None = None,
) -> list[Logger]:
    """CSV first, so that a trouble with another never costs it. Ranks above 0 log nothing.

    made_from: what is told beside the config: hashes of inputs and models, packages, git commit.

    Raises:
        InputError: TensorBoard is asked for and not installed.
    """
    made_from = made_from or {}
    if "tensorboard" in config.track and importlib.util.find_spec("tensorboard") is None:
        found = "tensorboard, which is not installed"
        raise InputError("track", found, "installed trackers", "Run: pip install 'draftsmith[tensorboard]'")
    if not is_first_process():
        return []
    make_directory(config.output)
    table = CsvLogger(config.output / "metrics.csv", resumed_step)
    loggers: list[Logger] = [table]
    if "tensorboard" in config.track:
        loggers.append(tensorboard_logger(config, resumed_step, made_from))
    wandb = wandb_logger(config, job, bool(resumed_step), say, made_from, table.kept)
    return loggers + ([wandb] if wandb is not None else [])

"""Loggers of a training (`--track csv wandb tensorboard`): metrics.csv always, Weights & Biases and TensorBoard by
Lightning's loggers."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.loggers.wandb import WandbLogger

from draftsmith.data.store.manifest import MANIFEST, resolved
from draftsmith.data.tracking import (
    check_names,
    data_artifact,
    finish_wandb,
    has_wandb_key,
    head_artifact,
    start_wandb,
    use_artifact,
)
from draftsmith.modules.pretrained.files import append, make_directory, write_text
from draftsmith.modules.pretrained.reading import metric_rows
from draftsmith.modules.types import InputError
from draftsmith.train.config import TrainConfig
from draftsmith.train.metrics import is_first_process

# Metrics whose best value is kept in a run's summary, beside the last value of every other.
BEST = {f"val/{name}": "max" for name in ("tau", "chain_length", "top1", "accepted", "auc")}
BEST |= {"val/loss": "min", "val/kl": "min"}


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

    def __init__(self, run: Any, log: Callable[[str], None]):
        super().__init__(experiment=run)
        self.run, self._log, self._open = run, log, True
        for name, best in BEST.items():
            run.define_metric(name, step_metric="trainer/global_step", summary=best)

    def log_head(self, directory: Path) -> None:
        """Log a head directory as the next version of the artifact `JOB-RUN`."""
        import wandb

        card = Path(self.run.dir).resolve().parent / "head-card.md"
        artifact = head_artifact(wandb, self.run.name, directory, card)
        self.run.log_artifact(artifact, aliases=["best", f"step-{artifact.metadata['step']}"])

    def finalize(self, status: str) -> None:
        if self._open:
            self._open = False
            finish_wandb(self.run, self._log, exit_code=0 if status == "success" else 1)


def wandb_client(config: TrainConfig, log: Callable[[str], None] = lambda text: None) -> Any | None:
    """Return the module of the Weights & Biases client, or None if it is switched off, and by `auto` if there is
    neither a key nor a mode.

    Raises:
        InputError: a name that the client refuses.
    """
    # The client's own variable may switch it off, or choose how it logs.
    mode = os.environ.get("WANDB_MODE")
    if "wandb" not in config.track or config.wandb == "off" or mode == "disabled":
        return None
    if config.wandb == "auto" and not (mode or has_wandb_key()):
        log("Weights & Biases: off, no key was found (`wandb login` logs online, --wandb offline into files)")
        return None
    import wandb

    check_names(wandb, config.project)
    return wandb


def start_run(
    config: TrainConfig, job: str, table: CsvLogger, resumed: bool, log: Callable[[str], None], about: dict[str, Any]
) -> TrackedRun | None:
    """Start a Weights & Biases run: online with a key, offline if asked for or if online does not start. Return None
    if it is switched off (`wandb_client`).

    The files lie in output/wandb; `wandb sync` uploads an offline run later. A resumed training keeps the run's id. If
    the server does not bring back what was logged before, `table` is logged again: uploading a second offline directory
    of one run replaces the first, so the last one has to hold everything.
    """
    wandb = wandb_client(config, log)
    if wandb is None:
        return None
    id_file = config.output / "wandb_id.txt"
    # A new training is a new run.
    if not resumed or not id_file.exists():
        write_text(id_file, uuid.uuid4().hex[:12] + "\n")
    options: dict[str, Any] = {
        "project": config.project,
        "name": f"{job} {config.output.name}",
        "job_type": job,
        "group": config.group,
        "dir": str(config.output),
        "config": about,
        "id": id_file.read_text().strip(),
        "resume": "allow" if resumed else None,
    }
    run = start_wandb(wandb, config.wandb, options, log)
    logger = TrackedRun(run, log)
    # Data artefacts are inputs of the run, in the lineage of its head.
    for path in (config.data, config.val):
        if path is not None and (path / MANIFEST).is_file():
            try:
                use_artifact(run, data_artifact(wandb, path))
            except Exception as error:
                # An error of the network or the server: the training does not need it.
                log(f"Weights & Biases: {path} is not in the head's lineage ({type(error).__name__})")
    # An offline run starts empty.
    if resumed and not run.resumed:
        for step, metrics in table.logged():
            logger.log_metrics(metrics, step)
    return logger


def make_loggers(
    config: TrainConfig,
    job: str,
    resumed_step: int,
    log: Callable[[str], None],
    made_from: Mapping[str, Any] | None = None,
) -> list[Logger]:
    """Return the loggers of a training, the CSV file first so that no other logger's error costs it; none on ranks
    above 0.

    made_from: logged beside the config: hashes of inputs and models, packages, git commit.

    Raises:
        InputError: TensorBoard is asked for and not installed.
    """
    if "tensorboard" in config.track and importlib.util.find_spec("tensorboard") is None:
        found = "tensorboard, which is not installed"
        raise InputError("track", found, "installed trackers", "Run: pip install 'draftsmith[tensorboard]'")
    if not is_first_process():
        return []
    make_directory(config.output)
    about = {**resolved(config), "made_from": dict(made_from or {})}
    table = CsvLogger(config.output / "metrics.csv", resumed_step)
    loggers: list[Logger] = [table]
    if "tensorboard" in config.track:
        # A resumed run adds a file that hides what follows its checkpoint.
        purge: Any = resumed_step + 1 if resumed_step else None
        board = TensorBoardLogger(
            config.output, name="", version="tensorboard", default_hp_metric=False, purge_step=purge
        )
        # TensorBoard renders Markdown: four spaces make a code block.
        lines = yaml.safe_dump(about, sort_keys=False).splitlines()
        board.experiment.add_text("config", "\n".join("    " + line for line in lines), resumed_step)
        loggers.append(board)
    run = start_run(config, job, table, bool(resumed_step), log, about)
    return loggers + ([run] if run is not None else [])

"""Where numbers go: a CSV file always, Weights & Biases where it can be reached, offline where it can not."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from draftsmith.data.manifest import resolved
from draftsmith.train.config import TrainConfig

WANDB_START_TIMEOUT_S = 20


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
        if resumed_step and path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                # A line cut short by a kill has no step or no rest.
                self._rows = [r for r in reader if (r["step"] or "x").isdigit() and int(r["step"]) <= resumed_step]
                self._columns = list(reader.fieldnames or ["step"])
        self._started = False

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved config lies beside the CSV file, as config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": str(step), **{name: f"{value:.8g}" for name, value in metrics.items()}}
        new = [name for name in row if name not in self._columns]
        self._rows.append(row)
        if new or not self._started:
            self._columns += new
            self._rewrite()
            self._started = True
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _rewrite(self) -> None:
        partial = self.path.with_name(self.path.name + ".tmp")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(self._rows)
        partial.replace(self.path)


def has_wandb_key() -> bool:
    """A key in the environment or in the netrc file that `wandb login` writes. Looks; does not read the key."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].rstrip("/")
    try:
        return path.exists() and host in netrc.netrc(str(path)).hosts
    except (netrc.NetrcParseError, OSError):
        return False


def wandb_logger(config: TrainConfig, job: str, say: Callable[[str], None]) -> Logger | None:
    """Online with a key, else offline; online that does not start falls back to offline. None when switched off.

    The files lie in output/wandb; `wandb sync` uploads an offline run later.
    """
    if config.wandb == "off":
        return None
    if os.environ.get("WANDB_MODE") == "disabled":
        return None
    from lightning.pytorch.loggers import WandbLogger

    os.environ.setdefault("WANDB_SILENT", "true")  # what a user needs to know of it is said here, once
    offline = config.wandb == "offline" or os.environ.get("WANDB_MODE") == "offline"
    if not offline and not has_wandb_key():
        offline = True
        say("Weights & Biases: no API key, so this run is logged offline (`wandb login` to change that)")
    common = {"project": config.project, "save_dir": str(config.output), "name": f"{job} {config.output.name}"}
    options = {**common, "config": resolved(config), "job_type": job}
    if not offline and rank_zero_only.rank == 0:
        logger = WandbLogger(**options, settings=_settings())
        try:
            _ = logger.experiment
            return logger
        except Exception as error:  # the client raises a family of its own for network, key and server troubles
            say(f"Weights & Biases: did not start online ({type(error).__name__}), so this run is logged offline")
            _forget_failed_run()
            offline = True
    return WandbLogger(**options, offline=offline, settings=_settings())


def _settings() -> Any:
    """Quiet, and nothing but the run's own numbers: no console text, machine load, git state or code."""
    import wandb

    return wandb.Settings(
        console="off",
        silent=True,
        init_timeout=WANDB_START_TIMEOUT_S,
        x_disable_stats=True,
        disable_git=True,
        save_code=False,
    )


def _forget_failed_run() -> None:
    """Let the next `wandb.init` start afresh after a failed one."""
    import wandb

    wandb.teardown()


def make_loggers(config: TrainConfig, job: str, resumed_step: int, say: Callable[[str], None]) -> list[Logger]:
    """CSV first, so that a trouble with Weights & Biases never costs it."""
    config.output.mkdir(parents=True, exist_ok=True)
    loggers: list[Logger] = [CsvLogger(config.output / "metrics.csv", resumed_step)]
    online = wandb_logger(config, job, say)
    return loggers + ([online] if online is not None else [])

"""Where numbers go: a CSV file always, Weights & Biases where it can be reached, offline where it can not."""

from __future__ import annotations

import csv
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from draftsmith.data.manifest import resolved
from draftsmith.train.config import TrainConfig
from draftsmith.train.metrics import is_first_process

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

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": str(step), **{name: f"{value:.8g}" for name, value in metrics.items()}}
        new = [name for name in row if name not in self._columns]
        self._rows.append(row)
        self._columns += new
        if new or not self._started:
            self._started = False  # until the whole file is there: a full disk may cut it short
            self._rewrite()
            self._started = True
            return
        self._started = False
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)
        self._started = True

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


class WandbLogger(Logger):
    """A Weights & Biases run that ends with the training. (Lightning's own leaves it open, so that the next training of
    the same process would go on writing into it.)"""

    def __init__(self, run: Any):
        super().__init__()
        self._run = run
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step")

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

    def finalize(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "success" else 1)


def wandb_logger(config: TrainConfig, job: str, resumed: bool, say: Callable[[str], None]) -> Logger | None:
    """Online with a key, else offline; online that does not start falls back to offline. None when switched off.

    The files lie in output/wandb; `wandb sync` uploads an offline run later. A continued training continues its run.
    """
    if config.wandb == "off" or os.environ.get("WANDB_MODE") == "disabled":
        return None
    import wandb

    offline = config.wandb == "offline" or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
    if not offline and not has_wandb_key():
        offline = True
        say("Weights & Biases: no API key, so this run is logged offline (`wandb login` to change that)")
    options: dict[str, Any] = {
        "project": config.project,
        "name": f"{job} {config.output.name}",
        "job_type": job,
        "dir": str(config.output),
        "config": resolved(config),
        "id": _run_id(config.output / "wandb_id.txt", resumed),
        "resume": "allow" if resumed else None,
    }
    if not offline:
        try:
            return WandbLogger(wandb.init(**options, mode="online", settings=_settings()))
        except Exception as error:  # the client raises a family of its own for network, key and server troubles
            say(f"Weights & Biases: did not start online ({type(error).__name__}), so this run is logged offline")
            wandb.teardown()  # else the next init waits for the failed one
    return WandbLogger(wandb.init(**options | {"resume": None}, mode="offline", settings=_settings()))


def _run_id(path: Path, resumed: bool) -> str:
    if not resumed or not path.exists():
        path.write_text(uuid.uuid4().hex[:12] + "\n")
    return path.read_text().strip()


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


def make_loggers(config: TrainConfig, job: str, resumed_step: int, say: Callable[[str], None]) -> list[Logger]:
    """CSV first, so that a trouble with Weights & Biases never costs it. Ranks above 0 log nothing."""
    if not is_first_process():
        return []
    config.output.mkdir(parents=True, exist_ok=True)
    loggers: list[Logger] = [CsvLogger(config.output / "metrics.csv", resumed_step)]
    wandb = wandb_logger(config, job, bool(resumed_step), say)
    return loggers + ([wandb] if wandb is not None else [])

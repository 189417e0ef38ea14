"""Signals end a run between steps, with everything saved."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import Any

import lightning.pytorch as pl

from draftsmith.data.console import log_note
from draftsmith.train.lit_head import SIGNALS
from draftsmith.train.metrics import is_first_process

REQUEUE_S = 60


class StopOnSignal(pl.Callback):
    """Ctrl-C, SIGTERM and SIGUSR1 let the current step finish, save and end the run; a second Ctrl-C ends it at once.

    In place of Lightning's handlers: its own for SIGTERM talks to other ranks from inside the handler, and Ctrl-C
    raises in the middle of a step. Its one for SIGUSR1 under SLURM saves from inside the handler, wherever in a step
    the rank happens to be and whether or not the others are there, a checkpoint of Lightning's own that knows neither
    our manifest nor our position in the data; `exit_code` requeues instead, once the step is saved. A repeated SIGTERM
    is ignored: whoever sends it follows it up with SIGKILL anyway.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python delivers signals to the main thread only

        def handle(number: int, frame: Any) -> None:
            pl_module.signal_received = number
            # torchrun passes a Ctrl-C on that the terminal has already sent to every process of the group.
            if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
                signal.signal(signal.SIGINT, signal.SIG_DFL)

        for number in SIGNALS:
            self._before[number] = signal.signal(number, handle)

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._restore()


def exit_code(number: int, goes_on: bool) -> int:
    """What this process ends with after a signal, when everything is saved: 128 + number, as a shell reports it.

    SIGUSR1 in a SLURM job whose command goes on from a checkpoint puts the job back into the queue first. Then it is 0:
    from the moment `scontrol requeue` returns, the job is pending again whatever its processes do, but a rank that
    ended with another code before that moment would end the step, and the job as failed. Where the job cannot be
    requeued the first process says why and fails, and with it the job.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if number != signal.SIGUSR1 or job is None or not goes_on:
        return 128 + number
    if not is_first_process():
        return 0
    try:
        result = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, check=False, timeout=REQUEUE_S
        )
        problem = result.stderr.strip() or "no reason given" if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        log_note(f"job {job} cannot be requeued: {problem}")
        return 128 + number
    log_note(f"job {job} is requeued and goes on from there")
    return 0

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
    """Handlers for Ctrl-C, SIGTERM and SIGUSR1: the current step finishes, everything is saved, and the run ends. A
    second Ctrl-C ends it at once; a repeated SIGTERM is ignored, as SIGKILL follows it anyway.

    They replace Lightning's handlers. Its SIGTERM handler talks to other ranks from inside the handler, and Ctrl-C
    raises in the middle of a step. Its SIGUSR1 handler under SLURM saves from inside the handler, anywhere in a step
    and whether or not the other ranks are there; `exit_code` requeues instead, once the step is saved.
    """

    def __init__(self) -> None:
        self._replaced: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            # Python delivers signals to the main thread only.
            return

        def handle(number: int, frame: Any) -> None:
            pl_module.signal_received = number
            # torchrun forwards a Ctrl-C that the terminal has already sent to every process of the group.
            if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
                signal.signal(signal.SIGINT, signal.SIG_DFL)

        # Restored at the end: the process may outlive the training, as in a notebook.
        for number in SIGNALS:
            self._replaced[number] = signal.signal(number, handle)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for number, before in self._replaced.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._replaced = {}

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def exit_code(number: int) -> int:
    """Return the exit code of this process after a signal, when everything is saved: 128 + number, as in a shell.

    After SIGUSR1 in a SLURM job put the job back into the queue and return 0. Once `scontrol
    requeue` returns, the job is pending again whatever its processes do; before that, a rank that exits with another
    code would end the step, and the job as failed. If the job cannot be requeued, the first process logs why and fails,
    and with it the job.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if number != signal.SIGUSR1 or job is None:
        return 128 + number
    if not is_first_process():
        return 0
    command = ["scontrol", "requeue", job]
    # Said before: SLURM may end this process while scontrol has not returned yet.
    log_note(f"asking SLURM to requeue job {job}, which resumes from there")
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=REQUEUE_S)
        problem = result.stderr.strip() or "no reason given" if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        log_note(f"job {job} cannot be requeued: {problem}")
        return 128 + number
    return 0

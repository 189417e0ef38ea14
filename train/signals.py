"""Signals end a run between steps, with everything saved."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import lightning.pytorch as pl

from draftsmith.train.lit_head import SIGNALS, LitHead


class StopOnSignal(pl.Callback):
    """Ctrl-C and SIGTERM let the current step finish, save and end the run; a second Ctrl-C ends it at once.

    In place of Lightning's handlers: its own for SIGTERM talks to other ranks from inside the handler, and Ctrl-C
    raises in the middle of a step. A repeated SIGTERM is ignored: whoever sends it follows it up with SIGKILL anyway.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LitHead)
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

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

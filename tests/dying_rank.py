"""`draftsmith` with a rank that dies in the last part of its fourth step: `dying_rank.py HOW LOCAL_RANK train ...`.

HOW is `raise` or `kill`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from draftsmith.launch.cli import main
from draftsmith.train.module import LitHead

if __name__ == "__main__":
    how, rank = sys.argv[1:3]
    read = LitHead.train_step
    parts = [0]

    def train_step(self: Any, part: Any) -> Any:
        parts[0] = parts[0] + 1 if self.trainer.global_step == 3 else 0
        if os.environ.get("LOCAL_RANK", "0") == rank and parts[0] == self.config.accumulate:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the memory of this rank is broken")
        return read(self, part)

    # In this process only, which is made to die: a real step has no place to do so.
    LitHead.train_step = train_step
    sys.exit(main(sys.argv[3:]))

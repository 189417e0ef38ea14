"""`draftsmith` with a rank that dies in the last part of its fourth step: `dying_rank.py HOW LOCAL_RANK train ...`.

HOW is `raise` or `kill`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from draftsmith.launch.cli import main
from draftsmith.train.lit_head import LitHead

if __name__ == "__main__":
    how, rank = sys.argv[1:3]
    step = LitHead.training_step

    def training_step(self: Any, part: Any, batch_idx: int) -> Any:
        if os.environ.get("LOCAL_RANK", "0") == rank and self.trainer.global_step == 3 and part.last:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the memory of this rank is broken")
        return step(self, part, batch_idx)

    # In this process only, which is made to die: a real step has no place to do so.
    LitHead.training_step = training_step  # type: ignore[method-assign]
    sys.exit(main(sys.argv[3:]))

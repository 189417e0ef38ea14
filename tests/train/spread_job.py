"""One process of a job whose processes are one target: a helper of spread_targets_test.py, started by torchrun.

    torchrun --nproc-per-node 2 spread_job.py JOBS.json

JOBS.json is a list of command lines, which are run one after the other in every process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from draftsmith.launch.cli import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    codes = [main(argv) for argv in json.loads(Path(sys.argv[1]).read_text())]
    sys.stdout.flush()
    os._exit(max(codes))  # what they are to show is on the disk

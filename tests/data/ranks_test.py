"""Who a process is: the variables as recorded inside real launches, and those that do not fit together."""

from __future__ import annotations

import pytest

from draftsmith.data.ranks import ProcessPlace, place
from draftsmith.modules.types import InputError

# What each launcher set in one of its processes; only names that look like ranks and sizes are kept.
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
# sbatch --nodes=2 --ntasks-per-node=1; SLURM 22.05.
BATCH = {"SLURM_JOB_ID": "1", "SLURM_LOCALID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_NTASKS": "2"}
BATCH |= {"SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "1(x2)"}
SRUN = {**BATCH, "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0"}
SRUN |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
# srun -N 1 -n 2 in the same job.
SMALLER_STEP = {**SRUN, "SLURM_NODEID": "0", "SLURM_LOCALID": "1", "SLURM_NNODES": "1", "SLURM_STEP_ID": "1"}
SMALLER_STEP |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2"}
UNEVEN = {**SRUN, "SLURM_NODEID": "3", "SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "7"}
UNEVEN |= {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({}, ProcessPlace(), id="alone"),
        pytest.param(TORCHRUN, ProcessPlace(3, 4, 1, 2, True), id="torchrun"),
        pytest.param(DEEPSPEED, ProcessPlace(3, 4, 1, 2, True), id="deepspeed"),
        pytest.param(BATCH, ProcessPlace(), id="the batch script itself"),
        pytest.param({**BATCH, "SLURM_STEP_ID": str(2**32 - 5)}, ProcessPlace(), id="a batch step with an id"),
        pytest.param({**BATCH, "SLURM_STEP_ID": str(2**32 - 6)}, ProcessPlace(), id="an interactive step"),
        pytest.param(SRUN, ProcessPlace(1, 2, 0, 1, True), id="srun"),
        pytest.param(SMALLER_STEP, ProcessPlace(1, 2, 1, 2, True), id="a step smaller than its job"),
        pytest.param(UNEVEN, ProcessPlace(6, 7, 0, 1, True), id="nodes with different numbers of tasks"),
        pytest.param({**SRUN, **TORCHRUN}, ProcessPlace(3, 4, 1, 2, True), id="torchrun in srun"),
        pytest.param({"LOCAL_RANK": "1", "NODE_RANK": "0"}, ProcessPlace(local_rank=1), id="a subprocess of Lightning"),
    ],
)
def test_a_process_knows_its_place(environment, expected):
    assert place(environment) == expected


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({**TORCHRUN, "RANK": "four"}, "four"),
        ({name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"}, "SLURM_LOCALID"),
        # Left in a shell by another program.
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK: found 1 among 1"),
        ({"RANK": "1"}, "RANK: found 1 among 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: found 2 among 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK: found -1 among 2"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK: found 2 among 2"),
        ({**SRUN, "SLURM_PROCID": "2"}, "RANK: found 2 among 2"),
        ({**BATCH, "LOCAL_RANK": "1"}, "LOCAL_RANK: found 1 among 1"),
    ],
)
def test_variables_that_do_not_fit_together_are_the_users_error(environment, named):
    with pytest.raises(InputError, match="Launch with") as caught:
        place(environment)
    assert named in str(caught.value)

"""The name that the processes of one run have in common."""

from __future__ import annotations

import os
import uuid

# Where the name is kept: processes inherit it from the one that starts them.
VARIABLE = "HASTEN_JOB"

_OF_A_LAUNCHER = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT")
_OF_ITS_PROCESSES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


def name_of_job() -> str:
    """Return a name that the processes of one run on this machine have in common, and others do not.

    Letters, digits, "-", "." and "_" only, so that it can be part of a file's name.
    """
    if VARIABLE not in os.environ:
        parts = [os.environ[name] for name in _OF_A_LAUNCHER if name in os.environ]
        started_by_one = any(name in os.environ for name in _OF_ITS_PROCESSES)
        os.environ[VARIABLE] = "-".join(parts) if parts and started_by_one else uuid.uuid4().hex
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in os.environ[VARIABLE])

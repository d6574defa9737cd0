"""How long a collective may take, for every group of ranks."""

from __future__ import annotations

from datetime import timedelta

from titan_launch.constants import UNWATCHED_GROUPS
from titan_launch.torch_private import process_groups, set_timeout


def set_timeouts(seconds: int) -> None:
    """End the run when a collective begun from now on takes longer than `seconds`, in any group of this rank.

    On this rank only, so all have to call it. Groups of a DeviceMesh are among them, which are made with PyTorch's own
    timeout (30 minutes on gloo, 10 on NCCL), whatever the process group was given.
    """
    for group in process_groups():
        if group.group_desc not in UNWATCHED_GROUPS:
            set_timeout(group, timedelta(seconds=seconds))

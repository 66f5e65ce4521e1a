"""How many processes train together, as launchers and torch say."""

import os

import torch.distributed as dist

from .errors import ArgumentError

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # torchrun, mpirun of Open MPI, mpirun of MPICH and Intel


def refuse_ranks() -> None:
    """offload() is for one process: several would each train a model of their own, without a word."""
    found = ""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        found = f"torch.distributed has {dist.get_world_size()} processes"
    for name in _SIZES:
        value = os.environ.get(name, "")
        if not found and value.isdigit() and int(value) > 1:
            found = f"the launcher has started {value} processes ({name})"
    if found:
        raise ArgumentError(f"offload() and initialize() are for one process, but {found}, and each would train a model of its "
                            "own. Start one process; or use sluice_offload.optim under DistributedDataParallel or FSDP, which "
                            "shares the optimizer's state among processes; or the C++ interface, whose ranks share parameters, "
                            "too")

"""What each placement of a checkpoint's tables would take of this machine, and whether it is there."""

import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from deltagram.ngram.checkpoint import TableSource
from deltagram.ngram.disk import CHUNK
from deltagram.ngram.host_step import CAPACITY
from deltagram.ngram.memory import numa_nodes

UNLIMITED = resource.RLIM_INFINITY


def placement_rows(tables: Sequence[TableSource], device: torch.device, processes: int = 1) -> list[tuple[str, str]]:
    """(placement, what it takes and whether that fits) for each placement of `tables`, and what the machine has.

    processes: how many would load the tables on this node.
    """
    total = sum(table.nbytes for table in tables)
    host, cuda = free_host_memory(), device.type == "cuda"
    staging = sum((CAPACITY if cuda else CHUNK) * (table.format.row_bytes + 8) for table in tables)
    lock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if cuda else UNLIMITED
    free = torch.cuda.mem_get_info(device)[0] if cuda else host
    where = "device memory" if cuda else "memory"
    pinned = "page-locked " if cuda else ""
    rows = [
        ("device", f"{_size(total)} of {where} a process: {_fits(total * (1 if cuda else processes), free)}"),
        ("host", f"{_size(total)} of {pinned}memory a process: {_fits(total * processes, host, lock)}"),
        ("shared", f"{_size(total)} of {pinned}memory a node: {_fits(total, host, lock)}"),
        ("disk", f"{_size(staging)} of {pinned}staging a process; rows are read from the checkpoint's files"),
        ("cached:SIZE:...", f"SIZE of {where} besides"),
    ]
    nodes = numa_nodes()
    if cuda:
        rows.append(("memory lock", "unlimited" if lock == UNLIMITED else f"{_size(lock)} (ulimit -l)"))
    rows.append(("NUMA", f"{len(nodes)} nodes, tables are interleaved" if len(nodes) > 1 else "one node"))
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        rows.append(("shared memory", f"/dev/shm of {_size(size)} is not used: tables are anonymous files"))
    return rows


def free_host_memory() -> int:
    """Bytes that this process can still take: what the machine has left, within its control group's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if os.path.exists(limit) and (text := Path(limit).read_text().strip()) != "max":
            free = min(free, max(0, int(text) - int(Path(used).read_text())))
    return free


def _fits(needed: int, free: int, lock: int = UNLIMITED) -> str:
    if lock != UNLIMITED and needed > lock:
        return f"does not fit, as only {_size(lock)} may be locked"
    return "fits" if needed <= free else f"does not fit, as {_size(free)} are free"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"

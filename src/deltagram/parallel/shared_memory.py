"""Memory that the processes of a group share, on one machine. It is gone when the last of them is, however it ended."""

import mmap
import os
import secrets
from typing import Protocol, TypeVar

T = TypeVar("T")
FOLDER = "/dev/shm"


class Deciding(Protocol):
    """What a group offers for this."""

    rank: int

    def broadcast_decision(self, value: T) -> T: ...
    def check(self, problem: str | None) -> None: ...


def shared_memory(group: Deciding, nbytes: int, purpose: str) -> mmap.mmap:
    """`nbytes` of zeroed memory, the same in every process of `group`, all of which call this.

    The pages are taken now. Raises ValueError, on every rank, where the machine has not as many to share.
    """
    path, problem = group.broadcast_decision(_create(nbytes, purpose) if group.rank == 0 else ("", None))
    if problem is None and group.rank:
        problem = None if os.path.exists(path) else f"{path} is missing: the ranks must run on one machine"
    try:
        group.check(problem)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(descriptor, nbytes)
        os.close(descriptor)
        group.check(None)  # every rank has mapped it
    finally:
        if group.rank == 0 and path:
            os.unlink(path)
    return memory


def _create(nbytes: int, purpose: str) -> tuple[str, str | None]:
    path = f"{FOLDER}/deltagram-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return "", f"{purpose} cannot be shared: {error}"
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.unlink(path)
        return "", f"{purpose} needs {nbytes} bytes of shared memory, more than {FOLDER} has: {error.strerror}"
    finally:
        os.close(descriptor)
    return path, None

"""Start the ranks of a group as processes of this machine: what `--ranks N` does. torchrun does as well."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

GRACE = 5.0  # seconds for the other ranks to say what they know, once one has failed


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a rank needs beside this process's own environment: the variables of torchrun."""
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in of_rank.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run `python arguments...` as `ranks` processes to their end, and return the exit code: of the first that failed.

    They share the processors unless OMP_NUM_THREADS says otherwise. When one fails, the others have GRACE seconds; what
    is left then, stopped processes too, is killed, as all are when this process is told to end (SIGTERM). An interrupt
    reaches all of them. Raises ValueError for fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {ranks}")
    port, threads = free_port(), max((os.cpu_count() or 1) // ranks, 1)
    inherited = {"OMP_NUM_THREADS": str(threads)} | os.environ
    processes = [
        subprocess.Popen([sys.executable, *arguments], env=inherited | environment(rank, ranks, port))
        for rank in range(ranks)
    ]
    code, ends_at = 0, float("inf")
    before = signal.signal(signal.SIGTERM, _told_to_end)
    try:
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < ends_at:
            failed = [each for each in codes if each]
            if failed and not code:
                code, ends_at = failed[0], time.monotonic() + GRACE
            time.sleep(0.05)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, before)
    code = code or next((process.returncode for process in processes if process.returncode), 0)
    return code if code >= 0 else 128 - code


def _told_to_end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)

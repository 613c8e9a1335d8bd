"""A rank that generates until another is stopped, or does not get to its next step, and what its request then says:
`serving_rank.py request|plan`."""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from deltagram import LLM, SamplingParams
from deltagram.parallel.groups import join
from deltagram.testing.checkpoints import write_tiny_checkpoint

group = join("cpu", deadline=3.0)
group.watchdog.on_hang = lambda report: print(f"request failed: {report}", flush=True)


def begin() -> None:
    print(f"began {time.monotonic()}", flush=True)


def stop() -> None:
    begin()
    os.kill(os.getpid(), signal.SIGSTOP)


def draft(tokens: Sequence[int], num_draft: int) -> list[int]:
    """Between two steps of rank 1."""
    if sys.argv[1] == "plan" and group.rank == 1 and len(tokens) > 40:
        begin()
        time.sleep(1000)
    return []


with tempfile.TemporaryDirectory() as folder:
    write_tiny_checkpoint(Path(folder))
    llm = LLM(folder, group=group, max_context=500, drafter=draft, adaptive_drafts=False)
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    if group.rank == 1:
        llm.generate("warm", SamplingParams(max_tokens=2))
        if sys.argv[1] == "request":
            threading.Timer(0.3, stop).start()
    else:
        llm.assist()
    try:
        while True:
            llm.generate("to be or not", params)
    except RuntimeError as error:
        print(f"raised HangError as RuntimeError: {error}", flush=True)
    time.sleep(1000)

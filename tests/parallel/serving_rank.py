"""A rank that generates until another is stopped, and what its request then says."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from deltagram import LLM, SamplingParams
from deltagram.parallel.groups import join
from deltagram.testing.checkpoints import write_tiny_checkpoint

group = join("cpu", deadline=3.0)
group.watchdog.on_hang = lambda report: print(f"request failed: {report}", flush=True)


def stop() -> None:
    print(f"began {time.monotonic()}", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


with tempfile.TemporaryDirectory() as folder:
    write_tiny_checkpoint(Path(folder))
    llm = LLM(folder, group=group, max_context=500)
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    if group.rank == 1:
        llm.generate("warm", SamplingParams(max_tokens=2))
        threading.Timer(0.3, stop).start()
    else:
        llm.assist()
    try:
        while True:
            llm.generate("to be or not", params)
    except RuntimeError as error:
        print(f"raised HangError as RuntimeError: {error}", flush=True)
    time.sleep(1000)

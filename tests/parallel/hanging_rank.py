"""A rank that runs steps until something goes wrong: `python hanging_rank.py SCENARIO`, as one of several."""

import os
import signal
import sys
import time

import torch

from deltagram.ngram.helpers import HelperError, Workers
from deltagram.parallel.groups import join
from deltagram.parallel.watchdog import HangError

group = join("cpu", **({} if sys.argv[1] == "default" else {"deadline": 3.0}))
chain, other = group.communicator("chain"), group.communicator("other")
culprit = group.rank == group.size - 1
workers = Workers(1, "reading rows")
part, whole = torch.full((4,), group.rank), torch.empty(group.size, 4, dtype=torch.int64)
group.watchdog.on_hang = lambda report: print(f"request failed: {report}", flush=True)
try:
    for step in range(1000):
        with group.watchdog.step(step, f"{step:016x}"):
            if step == 20 and culprit:
                print(f"began {time.monotonic()}", flush=True)
                match sys.argv[1]:
                    case "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    case "die":
                        os._exit(1)
                    case "skip":
                        continue
                    case "idle" | "default":
                        time.sleep(1000)
                    case "helper":
                        workers._jobs.put(None)
                        workers.threads[0].join()
            with chain.failing():
                workers.run([lambda: None])
            chain.all_gather(whole, part)
            other.all_gather(whole, part)
            assert whole[:, 0].tolist() == list(range(group.size))
except (HangError, HelperError) as error:
    print(f"raised {type(error).__name__}", flush=True)
    time.sleep(1000)  # a server would, until it is told to end: the watchdog sees to it that it does

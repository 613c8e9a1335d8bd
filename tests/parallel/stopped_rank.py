"""A rank that exchanges rows, step after step, until the last one stops itself: `stopped_rank.py DEVICE EXCHANGE`,
as one of several. The others fail their requests, say who is missing, and end."""

import os
import signal
import sys
import time

import torch
from peer_rank import FORMATS, Case

from deltagram.ngram.exchange_choice import Setup, make_exchange
from deltagram.parallel.groups import join
from deltagram.parallel.watchdog import HangError

group = join(sys.argv[1], deadline=5.0)
case = Case(group, FORMATS["ue8m0"], None)
exchange, _ = make_exchange(sys.argv[2], Setup(case.tables, group, group.communicator("chain"), 8, False))
group.watchdog.on_hang = lambda report: print(f"rank {group.rank} at {time.monotonic()} failed: {report}", flush=True)
own = torch.Generator().manual_seed(group.rank)
ids = case.ids(8, own)
exchange.exchange(ids, 8).take(0)  # compiles, which may take longer than a step
group.barrier()
try:
    for step in range(1000):
        with group.watchdog.step(step, f"{step:016x}"):
            if step == 20 and group.rank == group.size - 1:
                print(f"stopped at {time.monotonic()}", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            exchange.exchange(ids, 8).take(0).cpu()
except HangError as error:
    print(f"raised {error}", flush=True)
    time.sleep(1000)  # a server would, until it is told to end: the watchdog sees to it that it does

"""An engine process whose steps fail when a prompt asks for it: token 1 raises, token 2 ends the process, token 3
is a device that fails, and token 4 raises where no step is to blame."""

import os
import sys

import torch

from deltagram.engine.runner import Runner
from deltagram.engine.scheduler import Scheduler
from deltagram.serving import worker

launch, schedule = Runner.launch, Scheduler.schedule


def faulty(self, scheduled):
    for request in scheduled.requests:
        if 1 in request.prompt:
            raise RuntimeError(f"could not run {bytes(request.prompt).decode()}")
        if 2 in request.prompt:
            os._exit(9)
        if 3 in request.prompt:
            raise torch.AcceleratorError(f"the device failed at {bytes(request.prompt).decode()}")
    return launch(self, scheduled)


def escaping(self, ahead):
    scheduled = schedule(self, ahead)
    if scheduled is not None and any(4 in request.prompt for request in scheduled.requests):
        raise AssertionError(f"broken by {bytes(scheduled.requests[0].prompt).decode()}")
    return scheduled


Runner.launch, Scheduler.schedule = faulty, escaping
worker.serve(int(sys.argv[1]))

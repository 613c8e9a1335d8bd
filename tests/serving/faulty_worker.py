"""An engine process whose steps fail when a prompt asks for it: token 1 raises, token 2 ends the process, token 3
is a device that fails, and token 4 raises where no request is to blame."""

import os
import sys

import torch

from deltagram.engine.engine import Engine
from deltagram.engine.runner import Runner
from deltagram.serving import worker

launch, step = Runner.launch, Engine.step


def faulty(self, scheduled):
    for request in scheduled.requests:
        if 1 in request.prompt:
            raise RuntimeError(f"could not run {bytes(request.prompt).decode()}")
        if 2 in request.prompt:
            os._exit(9)
        if 3 in request.prompt:
            raise torch.AcceleratorError(f"the device failed at {bytes(request.prompt).decode()}")
    return launch(self, scheduled)


def escaping(self):
    for request in (*self.scheduler.running, *self.scheduler.waiting):
        if 4 in request.prompt:
            raise AssertionError(f"broken by {bytes(request.prompt).decode()}")
    return step(self)


Runner.launch, Engine.step = faulty, escaping
worker.serve(int(sys.argv[1]))

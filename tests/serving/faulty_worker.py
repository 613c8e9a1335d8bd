"""An engine process whose steps fail when a prompt asks for it: token 1 raises, token 2 ends the process."""

import os
import sys

from deltagram.engine.runner import Runner
from deltagram.serving import worker

launch = Runner.launch


def faulty(self, scheduled):
    for request in scheduled.requests:
        if 1 in request.prompt:
            raise RuntimeError(f"could not run {bytes(request.prompt).decode()}")
        if 2 in request.prompt:
            os._exit(9)
    return launch(self, scheduled)


Runner.launch = faulty
worker.serve(int(sys.argv[1]))

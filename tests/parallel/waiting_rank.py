"""A rank whose main thread copies from a device that is busy for seconds, behind a collective: its watchdog speaks."""

import time

import torch

from deltagram.parallel.groups import join
from deltagram.parallel.watchdog import HangError

group = join("cuda", deadline=1.0)
chain = group.communicator("chain")
part = torch.zeros(8, device=group.device)
out = part.new_empty(group.size, 8)
chain.all_gather(out, part)
out.cpu()
began = time.monotonic()
group.watchdog.on_hang = lambda report: print(f"after {time.monotonic() - began:.1f} s: {report}", flush=True)
try:
    with group.watchdog.step(1, f"{1:016x}"):
        torch.cuda._sleep(16_000_000_000)  # cycles, 8 to 10 seconds
        chain.all_gather(out, part)
        out.cpu()
except HangError as error:
    print(f"raised {error}", flush=True)
time.sleep(1000)

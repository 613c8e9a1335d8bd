"""What a stamp adds to a graph.

python benchmarks/kernels/bench_stamp.py (on a GPU)
"""

import torch

from deltagram.kernels.stamp import stamp
from deltagram.testing.timing import captured_us

if __name__ == "__main__":
    times = torch.zeros(64, dtype=torch.int64, device="cuda")
    print(f"{captured_us([lambda i=i: stamp(times[i : i + 1]) for i in range(64)]):.2f} us")

"""Times go on, and lie as far apart as what happened between them took."""

import time

import pytest
import torch

from deltagram.kernels.stamp import stamp


def test_times_of_the_host() -> None:
    times = torch.zeros(2, dtype=torch.int64)
    stamp(times[:1])
    time.sleep(0.01)
    stamp(times[1:])
    assert 10e6 <= int(times.diff()) < 5e9


@pytest.mark.gpu
def test_times_of_two_streams_compare() -> None:
    times = torch.zeros(3, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    stamp(times[:1])
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000)  # cycles: about a millisecond
        stamp(times[1:2])
    torch.cuda.current_stream().wait_stream(side)
    stamp(times[2:])
    first, second, third = times.tolist()
    assert 200_000 < second - first < 50_000_000 and 0 <= third - second < 10_000_000

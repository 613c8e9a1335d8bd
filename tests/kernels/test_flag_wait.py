"""flag_wait returns when the flag has come, and within its polls when it never does."""

import threading
import time

import pytest
import torch

from deltagram.kernels.flag_wait import flag_wait

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def words(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """flag, epoch, failed."""
    pinned = device == "cuda"
    flag, failed = (torch.zeros(1, dtype=torch.int64, pin_memory=pinned) for _ in range(2))
    return flag, torch.full((1,), 5, device=device), failed


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("value", [5, 9])
def test_a_flag_that_is_up_is_no_wait(device, value):
    flag, epoch, failed = words(device)
    flag.fill_(value)
    flag_wait(flag, epoch, failed, 1)
    finish(device)
    assert int(failed) == 0


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_waits_for_the_epoch_and_not_for_an_older_one(device):
    flag, epoch, failed = words(device)
    flag.fill_(4)

    def raise_it() -> None:
        time.sleep(0.05)
        flag.numpy()[0] = 5

    thread = threading.Thread(target=raise_it)
    begin = time.perf_counter()
    thread.start()
    flag_wait(flag, epoch, failed, 1_000_000)
    finish(device)
    assert int(failed) == 0 and time.perf_counter() - begin > 0.04
    thread.join()


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_flag_that_never_comes_ends_the_wait(device):
    flag, epoch, failed = words(device)
    begin = time.perf_counter()
    flag_wait(flag, epoch, failed, 1000)
    finish(device)
    assert int(failed) == 1 and time.perf_counter() - begin < 5


@pytest.mark.gpu
def test_the_default_bound_is_seconds():
    from deltagram.ngram.host_step import POLLS

    flag, epoch, failed = words("cuda")
    begin = time.perf_counter()
    flag_wait(flag, epoch, failed, POLLS)
    finish("cuda")
    seconds = time.perf_counter() - begin
    print(f"{POLLS} polls took {seconds:.2f} s")
    assert int(failed) == 1 and 0.5 < seconds < 5

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


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_all_flags_are_waited_for_as_long_as_some_come(device):
    """Eight flags 30 ms apart, and polls for a standstill of about 60 ms; then one that does not come, and then none is
    waited for."""
    _, epoch, failed = words(device)
    flags = torch.zeros(9, dtype=torch.int64, pin_memory=device == "cuda")
    polls = 1000 if device == "cpu" else 40_000

    def raise_them() -> None:
        for i in torch.randperm(8).tolist():
            time.sleep(0.03)
            flags.numpy()[i] = 5

    thread = threading.Thread(target=raise_them)
    thread.start()
    flag_wait(flags[:8], epoch, failed, polls)
    finish(device)
    assert int(failed) == 0 and (flags[:8] == 5).all()
    thread.join()
    flag_wait(flags, epoch, failed, polls)
    finish(device)
    assert int(failed) == 1
    begin = time.perf_counter()
    flag_wait(flags, epoch, failed, 1 << 30)
    finish(device)
    assert time.perf_counter() - begin < 0.1


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

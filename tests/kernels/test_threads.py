"""Threads that share a kernel's range: every piece is done once, whoever does it, and callers do not mix."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from deltagram.kernels.hyper_add import hyper_add
from deltagram.kernels.rms_norm import rms_norm


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def added(rows: int, calls: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """X after `calls` ops that add to it in place, which a piece done twice or not at all would show; and as it
    should be."""
    generator = torch.Generator().manual_seed(seed)
    x, out = torch.randn(rows, 2, 16, generator=generator), torch.randn(rows, 16, generator=generator)
    inject = torch.ones(rows, 2)
    expected = x.clone()
    for _ in range(calls):
        hyper_add(x, inject, out, "compiled")
        expected += out[:, None]
    return x, expected


@pytest.mark.parametrize("rows", [512, 513, 1000, 4096])
def test_every_piece_is_done_once(rows: int) -> None:
    x, expected = added(rows, 300)
    assert torch.equal(x, expected)


def test_threads_that_sleep_are_woken() -> None:
    for pause in (0.0, 1e-5, 1e-4, 1e-3, 1e-2) * 4:
        time.sleep(pause)
        x, expected = added(1024, 2)
        assert torch.equal(x, expected)


def test_callers_at_the_same_time_do_not_mix() -> None:
    with ThreadPoolExecutor(4) as pool:
        for x, expected in pool.map(lambda seed: added(700, 200, seed), range(8)):
            assert torch.equal(x, expected)


def test_arguments_must_be_those_of_the_kernel() -> None:
    from deltagram.kernels._cpu_rms_norm import _kernel
    from deltagram.kernels._threads import spread

    x = torch.ones(512, 16)
    assert torch.allclose(rms_norm(x, torch.ones(16), 0.0, "compiled"), x)
    with pytest.raises(Exception, match="pack"):
        spread(_kernel, 512, 1, 0, x.data_ptr())

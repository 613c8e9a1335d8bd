"""Every test runs on one thread: tiny tensors gain nothing from more, and on a busy machine threads wait. Tests marked
`gpu` are skipped where there is none."""

import signal

import pytest
import torch

torch.set_num_threads(1)
# A shell starts background jobs with ctrl-C ignored, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

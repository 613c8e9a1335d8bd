"""sample_tokens under Triton's interpreter, in a process of its own: see test_sample_tokens.py."""

import torch
from torch import Tensor

from deltagram.kernels.sample_tokens import Requests, Scratch, pick_from_all, triton
from deltagram.testing.interpreter import take_one_element_as_index
from deltagram.testing.sampling import check, check_last_of_many

take_one_element_as_index()

unsettled = 0
_launch = pick_from_all.launch


def _counting(sampled: Tensor, ends: Tensor, sequence: Tensor, position: Tensor, row: Tensor, requests: Requests,
              work: Scratch, *sizes: int) -> None:  # fmt: skip
    global unsettled
    unsettled += int(work.unsettled.sum())
    _launch(sampled, ends, sequence, position, row, requests, work, *sizes)


if __name__ == "__main__":
    cpu = torch.device("cpu")
    pick_from_all.launch = _counting
    assert check(130, torch.float32, range(6), cpu, cpu) > 3
    drawn = check(4300, torch.float32, range(3), cpu, cpu)  # more likely tokens than a block keeps aside
    assert drawn > 3 and unsettled > 5, (drawn, unsettled)
    triton.PROGRAMS = 7  # so that a program takes several blocks
    check_last_of_many(130, 130, cpu, cpu)

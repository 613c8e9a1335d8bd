"""Every test runs on one thread: tiny tensors gain nothing from more, and on a busy machine threads wait."""

import torch

torch.set_num_threads(1)

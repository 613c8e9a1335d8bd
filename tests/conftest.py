"""Every test runs on one thread: tiny tensors gain nothing from more, and a busy machine makes them wait for each other."""

import torch

torch.set_num_threads(1)

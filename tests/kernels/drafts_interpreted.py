"""Run in a process of its own by test_place_drafts.py: the kernels that write drafts and accept them, under Triton's
interpreter, against their references. It checks masks and indices.
"""

import torch
from test_commit_tokens import step

from deltagram.kernels.commit_tokens import commit_tokens
from deltagram.kernels.place_drafts import place_drafts
from deltagram.testing.interpreter import take_one_element_as_index

take_one_element_as_index()

for seed in range(30):
    arguments, _ = step(seed)
    for synthetic in (0.0, 1.0, 2.5):
        if len(arguments["row"]):
            plain, ours = ({name: tensor.clone() for name, tensor in arguments.items()} for _ in range(2))
            commit_tokens(**plain, synthetic=synthetic, impl="reference")
            commit_tokens(**ours, synthetic=synthetic, impl="triton")
            assert all(torch.equal(plain[name], ours[name]) for name in plain), (seed, synthetic)
    generator = torch.Generator().manual_seed(seed)
    int32 = {"dtype": torch.int32, "generator": generator}
    drafts = torch.randint(0, 99, (4, 7), generator=generator)[:, 1:6]
    count, lengths = torch.randint(0, 6, (4,), **int32), torch.randint(1, 20, (6,), **int32)
    rows = torch.randperm(6, **int32)[:4]
    plain, ours = torch.zeros(2, 6, 26, dtype=torch.int32).unbind()
    place_drafts(drafts, count, rows, plain, lengths, "reference")
    place_drafts(drafts, count, rows, ours, lengths, "triton")
    assert torch.equal(plain, ours), seed

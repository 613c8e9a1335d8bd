"""sample_tokens under Triton's interpreter, in a process of its own: see test_sample_tokens.py."""

import torch
import triton.runtime.interpreter as interpreter

from deltagram.testing.sampling import check

_patch = interpreter._patch_lang_tensor


def _patch_index(tensor, scope):  # NumPy 2.4 no longer turns an array of one element into an index by itself
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_index

if __name__ == "__main__":
    cpu = torch.device("cpu")
    assert check(130, torch.float32, range(6), cpu, cpu) > 3

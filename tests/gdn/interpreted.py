"""Run in a process of its own by test_interpreted.py: the kernels under Triton's interpreter, against the oracle.

It checks masks and indices: everything that is not read is NaN, and sizes are odd.
"""

import torch

from deltagram.kernels import gated_delta_chunk
from deltagram.kernels.rms_norm_gated import rms_norm_gated
from deltagram.step.plan import Bucket, Kind
from deltagram.testing.core_steps import CoreShape, CoreSteps, Part, oracle
from deltagram.testing.interpreter import take_one_element_as_index

take_one_element_as_index()
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True)  # scratch and outputs start as NaN


def run(shape: CoreShape, every: int) -> None:
    steps = CoreSteps(shape, 5, torch.float32, torch.device("cpu"), max_draft=2, impl="triton", every=every)
    plain = CoreSteps(shape, 5, torch.float32, torch.device("cpu"), impl="triton", seed=0)
    streams = [steps.stream(140, slot) for slot in range(5)]
    expected = [oracle(steps, stream) for stream in streams]

    def step(*parts: Part, pad: int = 0, mixed: bool = True) -> None:
        begins = [part.stream.done for part in parts]
        bucket = Bucket(sum(part.num_new for part in parts) + pad, len(parts) + pad // 2, mixed)
        for part, begin, result in zip(parts, begins, steps.step(list(parts), bucket), strict=True):
            outputs, states = expected[part.stream.slot]
            known = slice(begin, part.stream.done)
            torch.testing.assert_close(result.double(), outputs[known], rtol=1e-4, atol=2e-5)
            taken = part.stream.done - part.stream.pending
            state = steps.state.recurrent[part.stream.slot].double()
            torch.testing.assert_close(state, states[taken - 1], rtol=1e-4, atol=2e-5)

    a, b, c, d, e = streams
    step(Part(a, Kind.PREFILL, 70), Part(b, Kind.PREFILL, 2), Part(c, Kind.PREFILL, 1), pad=3)
    step(Part(b, Kind.DECODE), Part(c, Kind.VERIFY, 3, 1), Part(a, Kind.PREFILL, 65), Part(d, Kind.PREFILL, 3), pad=4)
    step(
        Part(b, Kind.DECODE),
        Part(c, Kind.DECODE),
        Part(a, Kind.VERIFY, 3, 0),
        Part(d, Kind.VERIFY, 2, 1),
        pad=9,
        mixed=False,
    )
    step(Part(a, Kind.DECODE), Part(c, Kind.VERIFY, 2), Part(b, Kind.VERIFY, 3, 2), Part(e, Kind.PREFILL, 1))
    step(Part(b, Kind.DECODE), Part(e, Kind.DECODE), mixed=False)
    step(Part(b, Kind.DECODE), Part(e, Kind.DECODE), Part(c, Kind.VERIFY, 3), mixed=False)

    stream = plain.stream(8, 4)
    stream.qkv, stream.a, stream.b = e.qkv, e.a, e.b
    plain.step([Part(stream, Kind.PREFILL, 6)])
    torch.testing.assert_close(
        plain.step([Part(stream, Kind.DECODE)])[0].double(), expected[4][0][6:7], rtol=1e-4, atol=2e-5
    )

    x = torch.randn(7, shape.value_heads, shape.value_dim)
    z = torch.randn(7, 500)[:, 3 : 3 + x[0].numel()].unflatten(1, x.shape[1:])
    x[5:] = float("nan")
    weight, cu_tokens = torch.randn(shape.value_dim), torch.tensor([0, 2, 5], dtype=torch.int32)
    for activation in ("silu", "sigmoid"):
        plain_norm, kernel = (
            rms_norm_gated(x, z, weight, cu_tokens, 1e-6, activation, impl) for impl in (None, "triton")
        )
        torch.testing.assert_close(kernel, plain_norm, rtol=1e-5, atol=1e-5)


run(CoreShape(1, 2, 8, 4), every=1)
run(CoreShape(1, 2, 8, 4), every=3)
gated_delta_chunk._token_by_token = lambda dtype, key_dim: False  # as bf16 inputs, whose arithmetic is wrong here
run(CoreShape(2, 2, 40, 24, width=3), every=4)

"""The core's compiled CPU kernels on mixed steps, against the formulas in float64; a request's bits whoever shares
its steps."""

import pytest
import torch

from deltagram.step.plan import Kind
from deltagram.testing.core_steps import CoreShape, CoreSteps, Part, oracle

CPU = torch.device("cpu")
SHAPES = (
    CoreShape(heads=2, value_heads=4, key_dim=20, value_dim=36),
    CoreShape(heads=1, value_heads=3, key_dim=5, value_dim=3),
)


def run(shape: CoreShape, alone: bool) -> list[torch.Tensor]:
    """Three prompts, one in two chunks, then decodes and verifies. Outputs by stream."""
    steps = CoreSteps(shape, 4, torch.float32, CPU, 2)
    streams = [steps.stream(150, seed) for seed in range(3)]
    got: list[list[torch.Tensor]] = [[], [], []]

    def step(parts: list[tuple[int, Part]]) -> None:
        groups = [[part] for part in parts] if alone else [parts]
        for group in groups:
            for (i, _), result in zip(group, steps.step([part for _, part in group]), strict=True):
                got[i].append(result)

    step(
        [
            (0, Part(streams[0], Kind.PREFILL, 64)),
            (1, Part(streams[1], Kind.PREFILL, 1)),
            (2, Part(streams[2], Kind.PREFILL, 130)),
        ]
    )
    step([(1, Part(streams[1], Kind.DECODE)), (0, Part(streams[0], Kind.PREFILL, 33))])
    for _ in range(3):
        step(
            [(0, Part(streams[0], Kind.DECODE)), (1, Part(streams[1], Kind.DECODE)), (2, Part(streams[2], Kind.DECODE))]
        )
    for wrong in (1, 2, 0):  # drafts that the next step finds accepted, or not
        verify = [(0, Part(streams[0], Kind.VERIFY, 3, wrong)), (1, Part(streams[1], Kind.VERIFY, 3, 2 - wrong))]
        step([(2, Part(streams[2], Kind.DECODE)), *verify])
    step([(n, Part(streams[n], Kind.DECODE)) for n in range(3)])
    return [torch.cat(parts) for parts in got]


@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_steps_follow_the_formulas_and_each_request_its_own_bits(shape: CoreShape) -> None:
    together = run(shape, alone=False)
    assert all(torch.equal(a, b) for a, b in zip(together, run(shape, alone=True), strict=True))
    exact = CoreSteps(shape, 4, torch.float64, CPU, 2)
    for seed, outputs in enumerate(together):
        stream = exact.stream(150, seed)
        torch.testing.assert_close(outputs.double(), oracle(exact, stream)[0][: len(outputs)], rtol=1e-4, atol=1e-5)

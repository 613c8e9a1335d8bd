"""The core's compiled CPU kernels on mixed steps, against the formulas in float64; a request's bits whoever shares
its steps."""

from dataclasses import replace

import pytest
import torch

from deltagram.gdn.core import Gate
from deltagram.kernels.rms_norm_gated import rms_norm_gated
from deltagram.step.plan import Kind
from deltagram.testing.core_steps import CoreShape, CoreSteps, Part, exact_bucket, oracle

CPU = torch.device("cpu")
SHAPES = (
    CoreShape(heads=2, value_heads=4, key_dim=20, value_dim=36),
    CoreShape(heads=1, value_heads=3, key_dim=5, value_dim=3),
)


def run(shape: CoreShape, alone: bool, every: int = 1) -> list[torch.Tensor]:
    """Three prompts, one in two chunks, then decodes and verifies. Outputs by stream."""
    steps = CoreSteps(shape, 4, torch.float32, CPU, 2, every=every)
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
    for every in (1, 3):  # tokens after which a state is stored
        assert all(torch.equal(a, b) for a, b in zip(together, run(shape, alone=True, every=every), strict=True))
    exact = CoreSteps(shape, 4, torch.float64, CPU, 2)
    for seed, outputs in enumerate(together):
        stream = exact.stream(150, seed)
        torch.testing.assert_close(outputs.double(), oracle(exact, stream)[0][: len(outputs)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", (*SHAPES, CoreShape()))
def test_head_by_head_is_op_by_op(shape: CoreShape) -> None:
    """The one kernel of steps without drafts has the bits of the several of steps that may have some; and the bits of
    the gated norm after it, padding included."""
    fused, several = (CoreSteps(shape, 4, torch.float32, CPU, drafts) for drafts in (0, 2))
    streams = [[steps.stream(150, seed) for seed in range(3)] for steps in (fused, several)]
    plan = ((Kind.PREFILL, (64, 1, 130)), (Kind.PREFILL, (33, 3, 0)), *[(Kind.DECODE, (1, 1, 1))] * 3)
    for kind, sizes in plan:
        outputs = []
        for steps, mine in zip((fused, several), streams, strict=True):
            parts = [Part(stream, kind if n else Kind.DECODE, n or 1) for stream, n in zip(mine, sizes, strict=True)]
            parts.sort(key=lambda part: part.kind)
            bucket = exact_bucket(parts)
            bucket = replace(bucket, tokens=bucket.tokens + 5, sequences=bucket.sequences + 1)
            table, rows = steps.table(parts, bucket), steps.rows(parts, bucket)
            z = torch.linspace(-2, 2, shape.value_dim).expand(len(rows), shape.value_heads, -1).contiguous()
            weight = torch.ones(shape.value_dim)
            pools = [pool.clone() for pool in steps.pools()]
            out = steps.run(table, rows)
            for pool, before in zip(steps.pools(), pools, strict=True):
                pool.copy_(before)
            gated = steps.run(table, rows, Gate(z, weight, 1e-6, "sigmoid"))
            assert torch.equal(gated, rms_norm_gated(out, z, weight, table.cu_tokens, 1e-6, "sigmoid"))
            assert not gated[-5:].any()
            outputs.append(steps.finish(parts, out))
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))

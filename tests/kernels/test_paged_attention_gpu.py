"""What paged attention claims on a GPU: its error, the same bits alone or in company, drafted or decoded, captured or
eager, and nothing read from where nobody wrote."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from deltagram.step.plan import Kind
from deltagram.testing.attention_steps import AttentionStep, Part, Text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DECODE, VERIFY, PREFILL = Kind.DECODE, Kind.VERIFY, Kind.PREFILL
CUDA = torch.device("cuda")
HEADS, KEY_HEADS, SIZE = 16, 4, 256


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Memory that nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def text(
    length: int, seed: int = 0, shape: tuple[int, int, int] = (HEADS, KEY_HEADS, SIZE), **options: torch.dtype
) -> Text:
    return Text.random(length, *shape, seed, options.get("dtype", torch.bfloat16), CUDA)


def mixed(shape: tuple[int, int, int], dtype: torch.dtype) -> list[Part]:
    texts = [text(1400, seed, shape, dtype=dtype) for seed in range(8)]
    shares = [
        (DECODE, 0, 1), (DECODE, 127, 1), (DECODE, 1000, 1), (VERIFY, 126, 6), (VERIFY, 640, 3), (PREFILL, 0, 300),
        (PREFILL, 64, 77), (PREFILL, 1300, 1),
    ]  # fmt: skip
    return [Part(one, *share) for one, share in zip(texts, shares, strict=True)]


def errors(out: Tensor, expected: Tensor) -> tuple[float, float]:
    """Error of the whole, and of the worst (token, head) on the scale of the mean one."""
    error = out.double() - expected
    worst = error.norm(dim=-1).max() / expected.norm(dim=-1).mean()
    return float(error.norm() / expected.norm()), float(worst)


SHAPES = [(16, 4, 256), (16, 2, 128), (6, 2, 80), (32, 1, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sparse", [False, True])
def test_error_against_float64(shape: tuple[int, int, int], dtype: torch.dtype, sparse: bool) -> None:
    step = AttentionStep(mixed(shape, dtype), pad_tokens=5, pad_sequences=2)
    selected = step.some_blocks(40, 16) if sparse else None
    expected = step.run("reference", selected, 16, exact=True)
    ours = step.run(None, selected, 16)
    assert not ours[step.total :].any()
    got, plain = (
        errors(out[: step.total], expected[: step.total]) for out in (ours, step.run("reference", selected, 16))
    )
    print(
        f"\n{shape} {dtype} sparse {sparse}: {got[0]:.2e} worst row {got[1]:.2e}; plain {plain[0]:.2e} {plain[1]:.2e}"
    )
    floor = 1e-7 if dtype is torch.float32 else 0
    assert got[0] <= 2 * plain[0] + 4 * floor and got[1] <= 2 * plain[1] + 40 * floor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sparse", [False, True])
def test_company_bucket_and_pages_do_not_matter(dtype: torch.dtype, sparse: bool) -> None:
    parts = mixed((HEADS, KEY_HEADS, SIZE), dtype)

    def run(some: list[Part], **options: int) -> list[Tensor]:
        step = AttentionStep(some, **options)
        return step.split(step.run(None, step.some_blocks(40, 16) if sparse else None, 16))

    alone = [run([part])[0] for part in parts]
    assert not any(out.isnan().any() for out in alone)
    for options in (
        {},
        {"pad_tokens": 9, "pad_sequences": 3, "seed": 3},
        {"width": 300, "seed": 5, "pad_sequences": 300},
    ):
        for i, out in enumerate(run(parts, **options)):
            assert torch.equal(out, alone[i]), (options, i)
    twice = [parts[i] for i in (2, 1, 0, 4, 3, 7, 6, 5)]
    for i, out in zip((2, 1, 0, 4, 3, 7, 6, 5), run(twice), strict=True):
        assert torch.equal(out, alone[i])


@pytest.mark.parametrize("longest", [300, 5000])
def test_many_sequences_have_the_bits_of_each_alone(longest: int) -> None:
    """So many that two programs share a multiprocessor, behind contexts around where parts begin and grow."""
    around = [at + d for at in (64, 128, 256, 384, 1024, 4096) for d in (-1, 0, 1, 2)]
    contexts = [context for context in [0, 1, *around] if context < longest]
    contexts += range(3, longest, longest // (47 - len(contexts)))
    parts = [Part(text(context + 1, seed), DECODE, context, 1) for seed, context in enumerate(contexts)]
    assert len(parts) * KEY_HEADS > torch.cuda.get_device_properties(CUDA).multi_processor_count
    together = AttentionStep(parts, pad_tokens=5, pad_sequences=3)
    out = together.run()
    assert not out[together.total :].any()
    for i, part in enumerate(parts):
        assert torch.equal(out[i], AttentionStep([part], seed=4).run()[0]), contexts[i]


@pytest.mark.parametrize("start", [0, 5, 124, 250, 1023, 4090, 8186, 16380])
def test_a_drafted_token_has_the_bits_of_a_decoded_one(start: int) -> None:
    """Across the positions where parts begin and where they grow."""
    one = text(start + 8)
    drafted = AttentionStep([Part(one, VERIFY, start, 8)])
    expected = [AttentionStep([Part(one, DECODE, start + i, 1)]).run()[0] for i in range(8)]
    assert torch.equal(drafted.run(), torch.stack(expected))


def test_a_prompt_split_at_multiples_of_64_is_whole() -> None:
    one = text(700)
    whole = AttentionStep([Part(one, PREFILL, 0, 700)]).run()
    for cuts in ((64,), (128, 192), (640,), (64, 128, 192, 256, 320, 384, 448, 512, 576, 640)):
        edges = [0, *cuts, 700]
        pieces = [AttentionStep([Part(one, PREFILL, a, b - a)]).run() for a, b in pairwise(edges)]
        assert torch.equal(torch.cat(pieces), whole), cuts


def exact(one: Text, position: int) -> Tensor:
    """The row at `position`, in float64: [Hq, D]."""
    q = one.q[position].double().unflatten(0, (one.k.shape[1], -1))
    k, v = one.k[: position + 1].double(), one.v[: position + 1].double()
    weight = torch.einsum("hgd,lhd->hgl", q, k).mul_(one.q.shape[2] ** -0.5).softmax(-1)
    return torch.einsum("hgl,lhd->hgd", weight, v).flatten(0, 1) * one.gate[position].double().sigmoid()


@pytest.mark.parametrize("batch", [1, 8])
def test_contexts_of_128k_tokens(batch: int) -> None:
    """A decoded token and one of a chunk, on keys peaked enough that the far ones count."""
    length = 131_072
    texts = [text(length - 13 * seed, seed) for seed in range(batch)]
    for one in texts:
        one.q.mul_(3)
    decode = [Part(one, DECODE, len(one.q) - 1, 1) for one in texts]
    chunk = Part(texts[0], PREFILL, 131_072 - 64, 64)
    outs = [*AttentionStep(decode).run(), AttentionStep([chunk]).run()[-1]]
    expected = [exact(one, len(one.q) - 1) for one in texts]
    for out, correct in zip(outs, [*expected, expected[0]], strict=True):
        whole, worst = errors(out, correct)
        print(f"\nbatch {batch}: {whole:.2e}, worst head {worst:.2e}")
        assert whole < 5e-3 and worst < 1e-2
    for out, part in zip(outs, decode, strict=False):
        assert torch.equal(out, AttentionStep([part], seed=7).run()[0])


@pytest.mark.parametrize("sparse", [False, True])
def test_captured_is_eager(sparse: bool) -> None:
    """One graph for all steps of its bucket: what they hold is read on the device."""
    first = AttentionStep(mixed((HEADS, KEY_HEADS, SIZE), torch.bfloat16), pad_tokens=5, pad_sequences=2, width=40)
    other = [Part(text(2000, 20 + n), DECODE, 150 * n, 1) for n in range(7)]
    second = AttentionStep([*other, Part(text(900, 30), PREFILL, 512, 380)], pad_tokens=8, pad_sequences=2, width=40)
    pages = max(len(first.k), len(second.k))
    pools = torch.full((2, pages, *first.k.shape[1:]), float("nan"), dtype=torch.bfloat16, device=CUDA)
    expected = [step.run(None, step.some_blocks(40, 16) if sparse else None, 16) for step in (first, second)]
    selected = torch.empty(len(first.q), 40, dtype=torch.int32, device=CUDA)
    table_rows = max(len(first.table), len(second.table))
    graph, held, out = torch.cuda.CUDAGraph(), None, None
    for step, correct in zip((first, second), expected, strict=True):
        pools.fill_(float("nan"))
        pools[0, : len(step.k)], pools[1, : len(step.v)] = step.k, step.v
        selected.copy_(step.some_blocks(40, 16))
        table = torch.zeros(table_rows, 40, dtype=torch.int32, device=CUDA)
        table[: len(step.table)] = step.table
        fields = [step.q, step.gate.contiguous(), table, *step.tables[1:]]
        if held is None:
            held = [field.clone() for field in fields]
            step.q, step.gate, step.table = held[:3]
            step.row, step.kind, step.cu_tokens, step.length, step.sequence, step.position = held[3:]
            step.k, step.v = pools.unbind()
            step.run(None, selected if sparse else None, 16)  # compiles
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = step.run(None, selected if sparse else None, 16)
        for kept, field in zip(held, fields, strict=True):
            kept.copy_(field)
        graph.replay()
        assert out is not None and torch.equal(out, correct)


def test_offsets_past_32_bits() -> None:
    """Pages whose first number lies past 2^31."""
    one = text(300)
    near = AttentionStep([Part(one, DECODE, 299, 1), Part(one, PREFILL, 200, 64)])
    far = AttentionStep([Part(one, DECODE, 299, 1), Part(one, PREFILL, 200, 64)])
    count = 2**31 // far.k[0].numel() + 1
    pools = []
    for pool in (far.k, far.v):
        big = torch.empty(count + len(pool), *pool.shape[1:], dtype=pool.dtype, device=CUDA)
        big[count:] = pool
        pools.append(big)
    far.k, far.v = pools
    far.table += count
    assert torch.equal(near.run(), far.run())

"""What the core claims on a GPU: the same bits captured or eager, alone or not, whole or split, drafted or decoded."""

import random
from collections.abc import Iterator

import pytest
import torch

from deltagram.step.plan import Bucket, Kind
from deltagram.testing.core_steps import CapturedCore, CoreShape, CoreSteps, Part, Stream, oracle, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DECODE, VERIFY, PREFILL = Kind.DECODE, Kind.VERIFY, Kind.PREFILL
SHAPE = CoreShape(heads=2, value_heads=4, key_dim=128, value_dim=128)
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Memory that nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def make(
    num_slots: int = 20, max_draft: int = 5, shape: CoreShape = SHAPE, every: int = 1, **options: torch.dtype
) -> CoreSteps:
    dtype = options.get("dtype", torch.bfloat16)
    return CoreSteps(shape, num_slots, dtype, CUDA, max_draft, options.get("state"), every=every)


def alike(stream: Stream, slot: int) -> Stream:
    """The same request, not begun, in another slot."""
    return Stream(stream.qkv, stream.a, stream.b, slot)


def begun(steps: CoreSteps, length: int, slot: int) -> Stream:
    """A request with `length` tokens computed."""
    stream = steps.stream(length + 300, slot)
    steps.step([Part(stream, PREFILL, length)])
    return stream


def kinds(steps: CoreSteps) -> dict[str, list[Part]]:
    """Steps of every kind, for a bucket of 128 tokens and 16 sequences. Slots 0 to 9 are begun, the others not."""
    old = [begun(steps, length, slot) for slot, length in enumerate((1, 2, 3, 50, 63, 64, 65, 70, 100, 128))]
    new = [steps.stream(200, slot) for slot in range(10, 20)]
    for stream in old[:3]:  # with accepted drafts to commit
        steps.step([Part(stream, VERIFY, 6, stream.slot)])
    verify = [Part(stream, VERIFY, 2 + i % 5, i % 2) for i, stream in enumerate(old)]
    decode = [Part(stream, DECODE) for stream in old]
    return {
        "verify only": verify,
        "one verify": verify[:1],
        "prefill only": [Part(stream, PREFILL, 21) for stream in new[:6]],
        "one long prefill": [Part(new[0], PREFILL, 128)],
        "verify and prefill": [*verify[:4], Part(new[0], PREFILL, 64), Part(new[1], PREFILL, 7)],
        "decode and prefill": [*decode[:5], Part(new[2], PREFILL, 65), Part(new[3], PREFILL, 2)],
        "all kinds": [*decode[:3], *verify[3:6], Part(new[4], PREFILL, 70), Part(old[9], PREFILL, 20)],
        "one-token prefills": [Part(stream, PREFILL, 1) for stream in new],
        "16 sequences": [*decode[:8], *[Part(stream, PREFILL, 3 + stream.slot % 4) for stream in new[:8]]],
        "all tokens used": [*decode[:8], Part(new[0], PREFILL, 64), Part(new[1], PREFILL, 56)],
        "decode only": decode,
        "resumed chunks": [Part(old[5], PREFILL, 64), Part(old[9], PREFILL, 1), Part(old[1], PREFILL, 3)],
        "empty": [],
        "ragged verify": [Part(stream, VERIFY, n, n - 1) for stream, n in zip(old, (2, 6, 3, 5, 4), strict=False)],
        "all padding but one": decode[4:5],
    }


@pytest.mark.parametrize("mixed", [True, False])
def test_captured_is_eager(mixed: bool) -> None:
    steps = make(every=4)
    cases = kinds(steps)
    if not mixed:
        cases = {name: case for name, case in cases.items() if all(part.kind is not PREFILL for part in case)}
    bucket = Bucket(128, 16, mixed)
    graph = CapturedCore(steps, bucket)
    before = [pool.clone() for pool in steps.pools()]
    for name, parts in cases.items():
        results, pools = [], []
        table, rows = steps.table(parts, bucket), steps.rows(parts, bucket)
        tokens = sum(part.num_new for part in parts)
        for captured in (False, True):
            for pool, saved in zip(steps.pools(), before, strict=True):
                pool.copy_(saved)
            if captured:
                graph.load(parts)
                graph.rows.copy_(rows)
                graph.graph.replay()
            out = graph.out if captured else steps.run(table, rows)
            results.append(out[:tokens].clone())
            pools.append([pool.clone() for pool in steps.pools()])
        assert same_bits(*results), name
        assert not results[0].isnan().any(), name
        assert all(same_bits(a, b) for a, b in zip(*pools, strict=True)), name
        used = {part.stream.slot for part in parts}
        rest = [slot for slot in range(21) if slot not in used]
        assert all(same_bits(a[rest], b[rest]) for a, b in zip(pools[0], before, strict=True)), name


def test_company_slots_and_bucket_do_not_matter() -> None:
    steps = make()
    prompts = [steps.stream(400, 0) for _ in range(6)]
    sizes = (1, 5, 64, 70, 129, 200)

    def run(order: list[int], together: bool, pad: int) -> dict[int, list[torch.Tensor]]:
        slots = random.Random(pad).sample(range(20), 6)
        streams = {i: alike(prompts[i], slots[i]) for i in order}
        history: dict[int, list[torch.Tensor]] = {i: [] for i in order}
        for parts in (
            [Part(streams[i], PREFILL, sizes[i]) for i in order],
            [Part(streams[i], DECODE) for i in order],
            [Part(streams[i], VERIFY, 2 + i % 5, i % 2) for i in order],
            [Part(streams[i], DECODE) for i in order],
        ):
            for batch in [parts] if together else [[part] for part in parts]:
                tokens, mixed = sum(part.num_new for part in batch), batch[0].kind is PREFILL
                outputs = steps.step(batch, Bucket(tokens + pad, len(batch) + pad, mixed or pad > 0))
                for part, out in zip(batch, outputs, strict=True):
                    i = next(i for i in order if streams[i] is part.stream)
                    history[i] += [out, steps.state.recurrent[part.stream.slot].clone()]
        return history

    alone = run(list(range(6)), together=False, pad=0)
    for order, pad in (([0, 1, 2, 3, 4, 5], 0), ([5, 3, 1, 0, 2, 4], 7), ([4, 2], 1)):
        company = run(order, together=True, pad=pad)
        for i in order:
            # wrong drafts are drawn anew in every run: they must not matter either
            assert all(same_bits(a, b) for a, b in zip(alone[i], company[i], strict=True)), (order, i)


@pytest.mark.parametrize("new", [1, 4])
def test_a_large_batch_has_the_bits_of_each_alone(new: int) -> None:
    """In a model's shape, where a batch of 48 and one of 1 fill the device differently."""
    steps = make(48, shape=CoreShape(16, 32, 128, 128), every=4)
    streams = [steps.stream(20, slot) for slot in range(48)]
    steps.step([Part(stream, PREFILL, 1 + stream.slot % 5) for stream in streams])
    for _ in range(3):
        steps.step([Part(stream, DECODE) for stream in streams])
    assert {stream.pending for stream in streams} == {0, 1, 2, 3}
    before = [pool.clone() for pool in steps.pools()]
    kind = VERIFY if new > 1 else DECODE
    parts = [Part(stream, kind, new) for stream in streams]
    bucket = Bucket(48 * new, 48, False)
    together = steps.run(steps.table(parts, bucket), steps.rows(parts, bucket)).unflatten(0, (48, new))
    after = [pool.clone() for pool in steps.pools()]
    for pool, saved in zip(steps.pools(), before, strict=True):
        pool.copy_(saved)
    bucket = Bucket(new, 1, False)
    for part, expected in zip(parts, together, strict=True):
        assert same_bits(steps.run(steps.table([part], bucket), steps.rows([part], bucket)), expected)
    assert all(same_bits(pool, expected) for pool, expected in zip(steps.pools(), after, strict=True))


def test_a_step_may_have_more_sequences_times_heads_than_65535() -> None:
    """Which is where all dimensions of a grid but the first end."""
    many = 1030
    steps = make(many, 0, CoreShape(1, 64, 16, 16))
    streams = [steps.stream(4, slot) for slot in range(many)]
    last = alike(streams[-1], 0)
    alone = [steps.step([Part(last, PREFILL, 3)])[0], steps.step([Part(last, DECODE)])[0]]
    company = [steps.step([Part(stream, PREFILL, 3) for stream in streams])[-1]]
    company.append(steps.step([Part(stream, DECODE) for stream in streams])[-1])
    assert all(same_bits(a, b) for a, b in zip(alone, company, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prompt_split_at_multiples_of_64_is_whole(dtype: torch.dtype) -> None:
    steps = make(dtype=dtype)
    prompt = steps.stream(700, 0)
    whole = alike(prompt, 0)
    expected = steps.step([Part(whole, PREFILL, 700)])[0]
    for slot, cuts in enumerate(((64,), (128, 192), (64, 128, 192, 256, 320, 384, 448, 512, 576, 640), (640,)), 1):
        stream, outputs = alike(prompt, slot), []
        for begin, end in zip((0, *cuts), (*cuts, 700), strict=True):
            outputs.append(steps.step([Part(stream, PREFILL, end - begin)], Bucket(end - begin + 3, 2, True))[0])
        assert same_bits(torch.cat(outputs), expected), cuts
        assert all(same_bits(pool[slot], pool[0]) for pool in steps.pools()[:2]), cuts


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("max_draft", "every"), [(5, 1), (5, 4), (0, 4), (0, 7)])
def test_replay_is_plain_decoding(state: torch.dtype, max_draft: int, every: int) -> None:
    """500 steps of random drafts and acceptance, with rings, against decoding without any and states that are stored
    in every step."""
    rng = random.Random(7)
    plain, drafting = make(3, 0, state=state), make(3, max_draft, every=every, state=state)
    streams = [drafting.stream(3010, slot) for slot in range(3)]
    twins = [alike(stream, slot) for slot, stream in enumerate(streams)]
    for steps, requests in ((drafting, streams), (plain, twins)):
        steps.step([Part(request, PREFILL, n) for request, n in zip(requests, (1, 40, 65), strict=True)])
    outputs: list[list[torch.Tensor]] = [[], [], []]
    for _ in range(500):
        parts = []
        for stream in streams:
            new = min(rng.choice((1, 1, 2, 3, 4, 5, 6)), 1 + max_draft)
            parts.append(Part(stream, VERIFY if new > 1 else DECODE, new, rng.randrange(new)))
        parts.sort(key=lambda part: part.kind)
        for part, out in zip(parts, drafting.step(parts), strict=True):
            outputs[part.stream.slot].append(out)
    steps_of_all = min(stream.done for stream in streams)
    graph = CapturedCore(plain, Bucket(3, 3, False))
    decoded: list[list[torch.Tensor]] = [[], [], []]
    while any(twin.done < stream.done for twin, stream in zip(twins, streams, strict=True)):
        parts = [Part(twin, DECODE) for twin, stream in zip(twins, streams, strict=True) if twin.done < stream.done]
        for part, out in zip(parts, graph.step(parts), strict=True):
            decoded[part.stream.slot].append(out)
    assert steps_of_all >= 500
    for slot in range(3):
        assert same_bits(torch.cat(outputs[slot]), torch.cat(decoded[slot]))
        while streams[slot].pending:
            drafting.step([Part(streams[slot], DECODE)])
            plain.step([Part(twins[slot], DECODE)])
        assert same_bits(drafting.state.recurrent[slot], plain.state.recurrent[slot])


SHAPES = [
    SHAPE,
    CoreShape(1, 4, 64, 256),
    CoreShape(2, 2, 256, 64),
    CoreShape(1, 2, 128, 64),
    CoreShape(1, 3, 96, 80, 3),
    CoreShape(1, 2, 16, 32),
]


def relative(error: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Error of the whole, and of the worst (token, head), on the scale of the mean one: some rows are nearly zero."""
    rows = error.norm(dim=-1) / expected.norm(dim=-1).mean()
    return (error.norm() / expected.norm()).item(), rows.max().item()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.key_dim}x{shape.value_dim}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_error_against_float64(shape: CoreShape, dtype: torch.dtype) -> None:
    errors = []
    for impl in ("triton", "reference"):
        steps = CoreSteps(shape, 2, dtype, CUDA, impl=impl)
        stream = steps.stream(200, 1)
        outputs, states = oracle(steps, stream)
        got = [steps.step([Part(stream, PREFILL, n)])[0] for n in (150, 1, 29)]
        got += [steps.step([Part(stream, DECODE)])[0] for _ in range(20)]
        out = torch.cat(got).double().cpu()
        errors.append(
            (
                relative(out - outputs, outputs),
                relative(steps.state.recurrent[1].double().cpu() - states[-1], states[-1]),
            )
        )
    for kernel, plain in zip(*errors, strict=True):
        print(f"\n{shape} {dtype} kernel {kernel[0]:.2e} worst row {kernel[1]:.2e} plain {plain[0]:.2e} {plain[1]:.2e}")
        floor = 1e-7 if dtype is torch.float32 else 0
        assert kernel[0] <= 2 * plain[0] + 4 * floor and kernel[1] <= 2 * plain[1] + 40 * floor


def test_offsets_past_32_bits() -> None:
    shape = CoreShape(16, 32, 128, 128)
    steps = CoreSteps(shape, 4100, torch.bfloat16, CUDA)
    assert steps.state.recurrent.numel() > 2**31
    a = steps.stream(80, 0)
    b = alike(a, 4099)
    for kind, size in ((PREFILL, 70), (DECODE, 1)):
        first, last = steps.step([Part(a, kind, size), Part(b, kind, size)])
        assert same_bits(first, last) and not first.isnan().any()
    assert same_bits(steps.state.recurrent[0], steps.state.recurrent[4099])


def test_repeated_tokens() -> None:
    """Equal keys make the triangular system as hard as it gets."""
    steps = CoreSteps(SHAPE, 1, torch.bfloat16, CUDA)
    stream = steps.stream(128, 0)
    stream.qkv[:] = stream.qkv[:1].clone()
    stream.b.fill_(8.0)  # beta near 1
    stream.a.fill_(-8.0)  # hardly any decay
    outputs, _ = oracle(steps, stream)
    out = steps.step([Part(stream, PREFILL, 128)])[0].double().cpu()
    assert relative(out - outputs, outputs)[0] < 2e-2

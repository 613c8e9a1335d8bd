"""The sampler against a naive float64 reading of its documentation, and its promise that rows do not meet."""

import numpy as np
import pytest
import torch
from scipy import stats

from deltagram import SamplingParams
from deltagram.engine import sampler
from deltagram.engine.sampler import SampleRow, SamplingTensors, Sizes, draw, sample, uniform
from deltagram.kernels.sample_tokens import reference

VOCAB = 24
MASK = 2**64 - 1


def run(logits, rows, positions, history, prompt_lengths, eos=(), sizes=None, device="cpu"):
    tensors = SamplingTensors.build(rows, eos_token_ids=eos, sizes=sizes, device=device)
    return sample(logits, tensors, positions, history, prompt_lengths)


def reference_logits(logits, params, history, position, prompt_length, eos=()):
    """One row in float64: bias, mask and penalties, one token at a time."""
    out = [float(x) for x in logits]
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    if position - prompt_length < params.min_tokens:
        for token in params.end_token_ids(eos):
            out[token] = -np.inf
    known = [int(t) for t in history[:position]]
    for token in set(known):
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token in known[prompt_length:]:
        out[token] -= params.frequency_penalty
    for token in set(known[prompt_length:]):
        out[token] -= params.presence_penalty
    return np.array(out)


def reference_probabilities(logits, params):
    """One row in float64: the distribution that is drawn from."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    order = [i for i in order if p[i] >= params.min_p * p.max()]
    order = order[: params.top_k or None]
    total, mass, kept = p[order].sum(), 0.0, []
    for i in order:
        if mass < params.top_p * total or params.top_p == 1:
            kept.append(i)
        mass += p[i]
    out = np.zeros(len(logits))
    out[kept] = p[kept]
    return out / out.sum()


def some_logits(seed=0, count=1, vocab=VOCAB):
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 2


CASES = {
    "temperature": dict(temperature=0.6),
    "plain": dict(temperature=1.0),
    "hot": dict(temperature=5.0),
    "top_k": dict(top_k=5),
    "top_k above vocabulary": dict(top_k=1000),
    "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.15),
    "min_p and top_k": dict(min_p=0.02, top_k=4),
    "top_p of the top_k": dict(temperature=1.5, top_k=8, top_p=0.7),
    "all filters": dict(temperature=1.7, min_p=0.05, top_k=10, top_p=0.9),
    "bias": dict(logit_bias={3: 2.5, 5: -100.0}),
    "repetition": dict(repetition_penalty=1.7),
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=0.8),
    "all": dict(temperature=1.3, repetition_penalty=0.7, presence_penalty=-0.5, top_p=0.95, logit_bias={1: 3.0}),
}


@pytest.mark.parametrize("across", ["seeds", "positions"])
@pytest.mark.parametrize("name", CASES)
def test_distribution(name, across):
    """Chi-square over seeds at one position, and along the positions of one seed."""
    draws, context, prompt_length = 20_000, 12, 5
    params = SamplingParams(**CASES[name])
    logits = some_logits(1)
    history = torch.randint(0, VOCAB, (1, context), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    if across == "seeds":
        rows, positions = [SampleRow(params, 0, s) for s in range(draws)], torch.full((draws,), context)
    else:
        rows, positions = [SampleRow(params, 0, 7)] * draws, torch.arange(context, context + draws)
    tokens = run(logits.expand(draws, -1), rows, positions, history, torch.full((draws,), prompt_length)).tokens
    expected = reference_probabilities(reference_logits(logits[0], params, history[0], context, prompt_length), params)
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    order = np.argsort(expected)
    rare = np.cumsum(expected[order]) * draws < 20  # tokens too rare for chi-square are taken as one
    groups = [order[rare], *([i] for i in order[~rare])]
    observed = [counts[g].sum() for g in groups if expected[g].sum() > 0]
    wanted = [expected[g].sum() * draws for g in groups if expected[g].sum() > 0]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


@pytest.mark.parametrize("seed", range(20))
def test_filters_keep_exactly_the_reference_set(seed):
    """With many ties, drawing every multiple of 1/2000 of the mass finds the set and its probabilities."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-3, 3, (1, VOCAB)) / 2).float()
    params = SamplingParams(
        temperature=float(rng.choice([0.5, 1.0, 2.0])),
        top_k=int(rng.integers(1, VOCAB + 3)) if seed % 2 else 0,
        top_p=float(rng.choice([0.013, 0.37, 0.71, 0.93])),
        min_p=float(rng.choice([0.0, 0.13, 0.5, 1.0])),
    )
    tensors = SamplingTensors.build([SampleRow(params, 0, 0)])
    weights = reference.weigh(logits, tensors.columns["temperature"])
    weights = weights * reference.kept(logits, weights, tensors.sizes.max_top_k, tensors.columns)
    expected = reference_probabilities(logits[0].double().numpy(), params)
    np.testing.assert_array_equal(weights[0].numpy() > 0, expected > 0)
    np.testing.assert_allclose(weights[0].numpy() / int(weights.sum()), expected, rtol=1e-11)


def test_ties_go_to_the_lowest_id():
    flat = torch.zeros(200, 10)
    where = torch.arange(200), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(200, dtype=torch.int64)

    def seen(**kwargs):
        return set(run(flat, [SampleRow(SamplingParams(**kwargs), 0, 3)] * 200, *where).tokens.tolist())

    assert seen(temperature=0) == seen(temperature=0, logit_bias={9: 0.0}) == {0}
    assert seen(top_k=3) == {0, 1, 2}
    assert seen(top_p=0.5) == {0, 1, 2, 3, 4}
    assert seen(top_p=0.41, top_k=5) == {0, 1, 2}
    assert seen(min_p=1.0) == seen() == set(range(10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_bias_and_mask_match_the_reference(dtype):
    """Greedy choices after random edits, at random positions of random histories with rubbish beyond them."""
    rng = np.random.default_rng(0)
    count, context, eos = 300, 30, [2, 3]
    logits = some_logits(3, count).to(dtype)
    history = torch.from_numpy(rng.integers(0, VOCAB, (count, context))).int()
    positions = torch.from_numpy(rng.integers(1, context, count))
    prompts = torch.from_numpy(rng.integers(1, positions.numpy() + 1))
    rows, expected = [], []
    order = rng.permutation(count)
    for n, r in enumerate(order.tolist()):
        params = SamplingParams(
            temperature=0,
            min_tokens=int(rng.integers(0, 4)),
            stop_token_ids=[7],
            ignore_eos=bool(n % 2),
            repetition_penalty=float(rng.choice([1.0, 0.5, 1.5])),
            presence_penalty=float(rng.choice([0.0, 0.7, -1.1])),
            frequency_penalty=float(rng.choice([0.0, 0.3])),
            logit_bias={int(t): float(rng.normal()) for t in rng.integers(0, VOCAB, n % 3)},
        )
        rows.append(SampleRow(params, r, 0))
        final = reference_logits(logits[n].float(), params, history[r], int(positions[n]), int(prompts[n]), eos)
        expected.append(int(final.argmax()))
        history[r, int(positions[n]) :] = 2**31 - 1
    tokens = run(logits, rows, positions, history, prompts, eos).tokens
    assert tokens.tolist() == expected
    assert any(t != g for t, g in zip(expected, logits.argmax(-1).tolist(), strict=True))


def test_min_tokens_ends_exactly_there():
    logits = torch.tensor([[0.0, 9.0, 1.0]]).expand(4, -1)
    params = SamplingParams(temperature=0, min_tokens=2)
    history = torch.zeros(1, 8, dtype=torch.int32)
    positions, prompts = torch.tensor([5, 6, 7, 8]), torch.full((4,), 5)
    assert run(logits, [SampleRow(params, 0, 0)] * 4, positions, history, prompts, eos=[1]).tokens.tolist() == [
        2,
        2,
        1,
        1,
    ]


def mixed_rows(count, rng):
    kinds = [dict(temperature=0), *CASES.values(), dict(temperature=0, min_tokens=9), dict(temperature=0, logprobs=2)]
    kinds += [dict(logprobs=0, top_p=0.5), dict(temperature=0, frequency_penalty=1.0, logprobs=5)]
    return [
        SampleRow(
            SamplingParams(**kinds[int(rng.integers(len(kinds)))]), int(rng.integers(6)), int(rng.integers(2**63))
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("vocab", [24, 1000, 5003])
def test_a_row_depends_on_itself_alone(vocab):
    """Bit for bit: alone, in a batch, among NaN padding, and with the surplus entries of a larger captured size."""
    rng = np.random.default_rng(vocab)
    count, padding = 40, 3
    rows = mixed_rows(count, rng)
    logits = some_logits(4, count, vocab)
    history = torch.from_numpy(rng.integers(0, vocab, (6, 50))).int()
    positions = torch.from_numpy(rng.integers(20, 50, count))
    prompts = torch.from_numpy(rng.integers(1, 20, count))
    batch = run(logits, rows, positions, history, prompts, eos=[1])

    junk = torch.full((padding,), 2**40)
    padded = (
        torch.cat([logits, torch.full((padding, vocab), torch.nan)]),
        rows, torch.cat([positions, junk]), history, torch.cat([prompts, -junk]),
    )  # fmt: skip
    needed = SamplingTensors.build(rows, eos_token_ids=[1]).sizes
    larger = Sizes(*([count + padding] * 4), needed.edits + 9, count + padding, 0, needed.max_logprobs)
    tight = needed._replace(
        penalized=needed.penalized + 1, edits=needed.edits + 1, special=needed.special + 2, max_top_k=0
    )
    for other in (run(*padded, eos=[1]), run(*padded, eos=[1], sizes=larger), run(*padded, eos=[1], sizes=tight)):
        for mine, theirs in zip(batch, other, strict=True):
            assert torch.equal(mine, theirs[:count])

    for n in range(count):
        at = slice(n, n + 1)
        alone = run(logits[at].clone(), rows[at], positions[at], history, prompts[at], eos=[1])
        assert torch.equal(alone.tokens, batch.tokens[at])
        if (asked := rows[n].params.logprobs) is not None:
            assert torch.equal(alone.logprobs, batch.logprobs[at])
            assert torch.equal(alone.top_tokens, batch.top_tokens[at, :asked])
            assert torch.equal(alone.top_logprobs, batch.top_logprobs[at, :asked])


def test_surplus_penalties_do_not_undo_the_first():
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    logits, history = torch.tensor([[1.0, 2.0, 0.0]]), torch.ones(1, 4, dtype=torch.int32)
    sizes = Sizes(special=2, penalized=3)
    out = run(logits, [SampleRow(params, 0, 0)], torch.tensor([4]), history, torch.tensor([1]), sizes=sizes)
    assert out.tokens.tolist() == [0]


def test_sizes_that_do_not_cover_are_refused():
    rows = [SampleRow(SamplingParams(top_k=3), 0, 0)]
    with pytest.raises(AssertionError, match="cannot serve"):
        sampler.pack(rows, sizes=Sizes(special=1, drawn=1, filtered=0))
    with pytest.raises(AssertionError, match="cannot serve"):  # the surplus row would be cut to three tokens
        sampler.pack(rows, sizes=Sizes(special=2, drawn=2, filtered=2, max_top_k=3))


def test_plain_greedy_costs_nothing_else():
    rows = [SampleRow(SamplingParams(temperature=0, top_k=5, top_p=0.5, stop="x"), 0, 0)] * 3
    tensors = SamplingTensors.build(rows)
    assert tensors.sizes == Sizes() and tensors.packed.numel() == 0


def test_needs_nothing_from_the_host():
    """On the meta device any read of a value, and any shape that depends on one, raises."""
    rows = mixed_rows(60, np.random.default_rng(0))
    tensors = SamplingTensors.build(rows, device="meta")
    assert all(size for name, size in tensors.sizes._asdict().items() if name != "max_top_k")
    meta = dict(device="meta", dtype=torch.int32)
    out = sample(
        torch.empty(64, VOCAB, device="meta"),
        tensors, torch.empty(64, **meta), torch.empty(6, 50, **meta), torch.empty(64, **meta),
    )  # fmt: skip
    assert out.tokens.shape == (64,) and out.top_tokens.shape == (64, 5)


def test_logits_are_left_alone():
    rows = [SampleRow(SamplingParams(presence_penalty=1.0, logit_bias={1: 1.0}), 0, 0)] * 2
    logits = some_logits(0, 2)
    before = logits.clone()
    run(logits, rows, torch.tensor([3, 3]), torch.zeros(1, 4, dtype=torch.int32), torch.tensor([1, 1]))
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_raw_logits():
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={9: 100.0}, repetition_penalty=2.0)
    logits = some_logits(5, 3)
    logits[1, 4:8] = 20.0  # equal: the lowest ids first
    logits[0] -= 50.0  # all negative
    where = torch.tensor([2, 2, 2]), torch.zeros(1, 4, dtype=torch.int32), torch.tensor([1, 1, 1])
    out = run(logits, [SampleRow(params, 0, 0), SampleRow(params, 0, 0), SampleRow(SamplingParams(), 0, 0)], *where)
    expected = logits.double().log_softmax(-1)
    assert out.tokens[:2].tolist() == [9, 9]
    torch.testing.assert_close(out.logprobs[:2].double(), expected[:2, 9], atol=1e-5, rtol=0)
    assert out.top_tokens[1].tolist() == [4, 5, 6]
    assert out.top_tokens[0].tolist() == expected[0].topk(3).indices.tolist()
    torch.testing.assert_close(out.top_logprobs[0].double(), expected[0].topk(3).values, atol=1e-5, rtol=0)


def splitmix64(state):
    state &= MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_uniform_is_splitmix64():
    """Python's integers as the oracle. Seed 0, stream 0 is the published generator, whose first output is below."""
    assert splitmix64(0x9E3779B97F4A7C15) == 16294208416658607535
    assert uniform(torch.tensor(0), torch.tensor(1)).item() == (16294208416658607535 >> 11) / 2**53
    rng = np.random.default_rng(0)
    seeds = torch.from_numpy(rng.integers(0, 2**63, 500))
    positions = torch.from_numpy(rng.integers(0, 2**31, 500))
    for stream in (0, 1, 5):
        got = uniform(seeds, positions, stream)
        for s, p, u in zip(seeds.tolist(), positions.tolist(), got.tolist(), strict=True):
            state = s * 0xDA942042E4DD58B5 + p * 0x9E3779B97F4A7C15 + stream * 0xD1342543DE82EF95
            assert u == max(splitmix64(state) >> 11, 1) / 2**53


def test_uniform_fills_the_interval():
    assert uniform(torch.tensor(0), torch.tensor(0)).item() == 2.0**-53  # the hash is 0 there, the number is not
    for values in (
        uniform(torch.arange(100_000), torch.tensor(17)),  # neighbouring seeds
        uniform(torch.tensor(3), torch.arange(100_000)),  # neighbouring positions
        uniform(torch.tensor(3), torch.arange(100_000), stream=1),
    ):
        assert 0 < values.min() and values.max() < 1
        assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01
    a, b = uniform(torch.tensor(3), torch.arange(10_000)), uniform(torch.tensor(3), torch.arange(10_000), stream=1)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


def test_near_seeds_and_streams_do_not_share_a_stretch_of_numbers():
    """Every pair (seed, stream) is a start in one long sequence: starts of near pairs lie over 2^40 positions apart."""
    per_position = pow(0x9E3779B97F4A7C15, -1, 2**64)
    steps = [a * per_position & MASK for a in (0xDA942042E4DD58B5, 0xD1342543DE82EF95)]
    seeds, streams = np.arange(2**18, dtype=np.uint64), np.arange(8, dtype=np.uint64)
    with np.errstate(over="ignore"):
        starts = np.sort((seeds[:, None] * np.uint64(steps[0]) + streams * np.uint64(steps[1])).ravel())
        assert np.diff(starts, append=starts[:1]).min() > 2**40


def test_draw_never_takes_weight_zero():
    weights = torch.tensor([[0, 5, 0, 3, 0]]).expand(8, -1)
    uniforms = torch.tensor(
        [2.0**-53, 0.3, 5 / 8 - 2.0**-53, 5 / 8, 0.7, 0.9, 1 - 2.0**-53, 1 - 2.0**-52], dtype=torch.float64
    )
    assert draw(weights, uniforms).tolist() == [1, 1, 1, 3, 3, 3, 3, 3]
    full = torch.full((1, sampler.MAX_VOCAB_SIZE), 2**42)  # the largest sum there can be
    assert draw(full, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == sampler.MAX_VOCAB_SIZE - 1
    assert draw(full, torch.tensor([2.0**-53], dtype=torch.float64)).item() == 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-6, 1e300])
def test_extreme_temperatures(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf]]).expand(500, -1)
    rows = [SampleRow(SamplingParams(temperature=temperature), 0, s) for s in range(500)]
    where = (
        torch.zeros(500, dtype=torch.int64),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(500, dtype=torch.int64),
    )
    assert set(run(logits, rows, *where).tokens.tolist()) == ({1} if temperature < 1 else {0, 1, 2})


def test_nan_logits_still_give_an_id():
    rows = [SampleRow(SamplingParams(top_p=0.9), 0, s) for s in range(50)] + [SampleRow(SamplingParams(), 0, 1)]
    where = torch.zeros(51, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(51, dtype=torch.int64)
    tokens = run(torch.full((51, VOCAB), torch.nan), rows, *where).tokens
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


@pytest.mark.gpu
def test_captured_graph_gives_the_tokens_of_eager_and_of_cpu():
    rng = np.random.default_rng(0)
    count, vocab = 32, 1000
    sizes = Sizes(*([count] * 4), 64, count, 0, 5)
    batches = [mixed_rows(count, rng) for _ in range(3)]
    history = torch.from_numpy(rng.integers(0, vocab, (6, 50))).int()
    prompts = torch.from_numpy(rng.integers(1, 20, count))
    logits, positions = some_logits(1, count, vocab), torch.from_numpy(rng.integers(20, 50, count))
    static = [x.cuda() for x in (logits, positions, history, prompts)]
    tensors = SamplingTensors.build(batches[0], eos_token_ids=[1], sizes=sizes, device="cuda")

    def step():
        return sample(static[0], tensors, *static[1:])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for rows in batches:
        packed, _ = sampler.pack(rows, eos_token_ids=[1], sizes=sizes)
        tensors.packed.copy_(torch.from_numpy(packed))
        graph.replay()
        exact = sample(static[0], SamplingTensors.build(rows, eos_token_ids=[1], device="cuda"), *static[1:])
        host = run(logits, rows, positions, history, prompts, eos=[1])
        assert torch.equal(captured.tokens, exact.tokens)
        assert torch.equal(captured.tokens.cpu(), host.tokens)

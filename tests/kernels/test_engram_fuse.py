"""engram_fuse against the formula in float64, at its corners, and against nemo-automodel's layer (tests/ngram)."""

import math

import pytest
import torch

from deltagram.kernels.engram_fuse import engram_fuse

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
EPS = 1e-6


def plain(x, key, value, weight, live):
    """The formula, stream by stream, in the dtype of its inputs."""
    streams = []
    for h in range(x.shape[1]):
        rms_x = (x[:, h].square().mean(1) + EPS).sqrt()
        rms_k = (key[:, h].square().mean(1) + EPS).sqrt()
        dot = (x[:, h] * weight[h] * key[:, h]).sum(1) / (rms_x * rms_k * math.sqrt(x.shape[2]))
        sign = torch.where(dot >= 0, 1.0, -1.0).to(dot)
        gate = torch.sigmoid(sign * dot.abs().clamp(min=1e-6).sqrt()) * live
        streams.append(x[:, h] + gate[:, None] * value)
    return torch.stack(streams, 1)


def inputs(num_tokens: int, streams: int, dim: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(num_tokens, streams, dim, generator=generator).to(dtype)
    kv = torch.randn(num_tokens, (streams + 1) * dim, generator=generator).to(dtype)
    key, value = kv[:, : streams * dim].unflatten(1, (streams, dim)), kv[:, streams * dim :]
    weight = torch.randn(streams, dim, generator=generator)
    return x, key, value, weight, torch.rand(num_tokens, generator=generator) < 0.7


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 5120), (7, 2, 96), (33, 4, 1000), (0, 4, 64)], ids=str)
def test_error_is_that_of_plain_arithmetic(device, dtype, shape):
    x, key, value, weight, live = inputs(*shape, dtype)
    exact = plain(x.double(), key.double(), value.double(), weight.double(), live)
    simple = plain(x.float(), key.float(), value.float(), weight, live).to(dtype)
    kv = torch.cat([key.flatten(1), value], 1).to(device)  # strided, as a projection leaves them
    key, value = kv[:, : shape[1] * shape[2]].unflatten(1, shape[1:]), kv[:, shape[1] * shape[2] :]
    before = x.to(device)
    got = engram_fuse(before, key, value, weight.to(device), EPS, live.to(device))
    assert torch.equal(before.cpu(), x) and got.dtype == dtype
    error, allowed = ((y.double().cpu() - exact).abs() for y in (got, simple))
    if error.numel():
        assert error.mean() <= 2 * allowed.mean() + 1e-9
        assert error.amax((1, 2)).max() <= 2 * allowed.amax() + 1e-6
    everyone = engram_fuse(before, key, value, weight.to(device), EPS)
    assert torch.equal(everyone[live.to(device)], got[live.to(device)])


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_dot_of_zero_counts_as_positive(device, zero):
    """Engines disagree at -0.0, where copysign would give minus."""
    x = torch.full((1, 1, 2), zero, device=device)
    key, weight = torch.ones(1, 1, 2, device=device), torch.ones(1, 2, device=device)
    got = engram_fuse(x, key, torch.ones(1, 2, device=device), weight, EPS)
    torch.testing.assert_close(got.cpu(), torch.full((1, 1, 2), 1 / (1 + math.exp(-1e-3))), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_masked_token_is_left_as_it_is(device):
    x, key, value, weight, _ = inputs(3, 2, 64, torch.bfloat16)
    live = torch.tensor([True, False, True])
    got = engram_fuse(*(y.to(device).contiguous() for y in (x, key, value, weight)), EPS, live.to(device)).cpu()
    assert torch.equal(got[1], x[1]) and not torch.equal(got[0], x[0])


@pytest.mark.gpu
def test_the_same_bits_in_any_company():
    x, key, value, weight, live = (y.cuda() for y in inputs(64, 4, 5120, torch.bfloat16))
    whole = engram_fuse(x, key, value, weight, EPS, live)
    for t in (0, 17, 63):
        alone = engram_fuse(x[t : t + 1], key[t : t + 1], value[t : t + 1], weight, EPS, live[t : t + 1])
        assert torch.equal(alone, whole[t : t + 1])

"""The kernels sample what the reference samples, bit for bit; the reference is what the engine does on a CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltagram import SamplingParams
from deltagram.engine.request_table import RequestTable
from deltagram.engine.sampler import SampleRow, SamplingTensors, sample
from deltagram.kernels.sample_tokens import Scratch, sample_tokens
from deltagram.testing.sampling import CONTEXT, EDITS, LOGPROBS, check, check_last_of_many

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")
def test_the_kernels_under_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, str(HERE / "sampling_interpreted.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "dtype"), [(130, torch.float32), (5000, torch.bfloat16), (248320, torch.bfloat16)])
def test_the_kernels_sample_what_the_reference_samples(vocab: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    assert check(vocab, dtype, range(60 if vocab < 10_000 else 20), device, device) > 20


@pytest.mark.gpu
def test_one_sequence_of_many_gets_what_it_asks_for() -> None:
    device = torch.device("cuda")
    for count, vocab in ((2, 5000), (128, 5000), (129, 5000), (300, 130)):
        check_last_of_many(count, vocab, device, device)


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, logprobs=1),
    SamplingParams(temperature=1.5, top_p=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=-0.2),
    SamplingParams(temperature=0.9, logit_bias={3: 4.0, 7: -5.0}, min_tokens=4, frequency_penalty=0.5),
]


def test_the_reference_is_what_the_engine_does_on_a_cpu() -> None:
    vocab, cpu = 60, torch.device("cpu")
    torch.manual_seed(1)
    logits = torch.randn(len(PARAMS), vocab) * 3
    history = torch.randint(0, vocab, (len(PARAMS) + 1, CONTEXT), dtype=torch.int32)
    positions = torch.randint(12, CONTEXT, (len(PARAMS),))
    prompts = torch.full((len(PARAMS),), 10)
    requests = RequestTable(len(PARAMS) + 1, vocab, EDITS, cpu)
    for row, params in enumerate(PARAMS):
        requests.admit(row, params, 5 + row, 10, (1, 2), constrained=False)
    count = torch.arange(len(PARAMS), dtype=torch.int32)
    plan = count, torch.arange(len(PARAMS) + 1, dtype=torch.int32), count, (positions - 1).int(), count
    ours = sample_tokens(logits, *plan, history, requests.on_device, Scratch.of(9, vocab, LOGPROBS, cpu))
    rows = [SampleRow(params, row, 5 + row) for row, params in enumerate(PARAMS)]
    tensors = SamplingTensors.build(rows, eos_token_ids=(1, 2))
    expected = sample(logits, tensors, positions, history, prompts)
    assert torch.equal(ours[0], expected.tokens)
    assert expected.logprobs is not None and expected.top_tokens is not None
    for n, params in enumerate(PARAMS):
        if params.logprobs is not None:
            assert torch.equal(ours[1][n], expected.logprobs[n])
            assert torch.equal(ours[2][n, : params.logprobs], expected.top_tokens[n, : params.logprobs])

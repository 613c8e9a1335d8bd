"""Sampling after 1, 16, 48 and 64 tokens of a vocabulary of 248,320, replayed as a graph, for requests of every kind.

python benchmarks/kernels/bench_sample_tokens.py (on a GPU)
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.engine.params import SamplingParams
from deltagram.engine.request_table import RequestTable
from deltagram.kernels.sample_tokens import Scratch, sample_tokens
from deltagram.testing.timing import captured_us

VOCAB, CONTEXT = 248320, 4096
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=1.0),
    "top_k 20, top_p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "top_p 0.95 of a flat distribution": SamplingParams(temperature=50.0, top_p=0.95),
    "top_k 5000, top_p 0.9 of a flat distribution": SamplingParams(temperature=50.0, top_k=5000, top_p=0.9),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "20 log-probabilities": SamplingParams(temperature=0.0, logprobs=20),
}

if __name__ == "__main__":
    device, results = torch.device("cuda"), {}
    for count in (1, 16, 48, 64):
        index = torch.arange(count, dtype=torch.int32, device=device)
        ends = torch.arange(count + 1, dtype=torch.int32, device=device)
        position = torch.full((count,), 2000, dtype=torch.int32, device=device)
        history = torch.randint(0, VOCAB, (count, CONTEXT), dtype=torch.int32, device=device)
        logits = (torch.randn(count, VOCAB, device=device) * 3).bfloat16()
        work = Scratch.of(count, VOCAB, 20, device)
        for name, params in CASES.items():
            table = RequestTable(count, VOCAB, 512, device)
            for row in range(count):
                table.admit(row, params, row, 1000, (), constrained=False)
            call = partial(sample_tokens, logits, index, ends, index, position, index, history, table.on_device, work)
            results[f"{count} rows, {name}"] = {"us": captured_us([call])}
            print(f"{count} rows, {name}: {results[f'{count} rows, {name}']['us']:.1f} us", flush=True)
    save("sample_tokens", results)

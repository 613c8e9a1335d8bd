"""ngram_hash: DeepSeek-V4.1's two layers of 24 columns in one call, 1 to 4096 tokens, on a GPU if there is one.

python benchmarks/kernels/bench_ngram_hash.py
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

sys.path.append(str(Path(__file__).parents[1]))
from environment import save

from deltagram.ngram.spec import HashConstants, engram_specs
from deltagram.testing.timing import captured_us

TOKENS = (1, 16, 256, 4096)


def microseconds(constants: HashConstants, num_tokens: int, device: torch.device) -> float:
    history = torch.randint(99092, (64, 8192), dtype=torch.int32, device=device)
    calls = []
    for _ in range(16):  # positions that differ
        sequence = torch.arange(num_tokens, device=device, dtype=torch.int32) % 64
        row = torch.randperm(64, device=device).int()
        position = torch.randint(8192, (num_tokens,), dtype=torch.int32, device=device)
        calls.append(partial(constants.ids, history, sequence, row, position))
    if device.type == "cuda":
        return captured_us(calls)
    return Timer("calls[0]()", globals={"calls": calls}).blocked_autorange(min_run_time=0.3).median * 1e6


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    specs = engram_specs(
        token_map=range(99092),
        compressed_vocab_size=99092,
        pad_token=2,
        max_order=4,
        heads=8,
        base=16_000_000,
        layers=[1, 14],
        num_rows=[384006168, 384016682],
    )
    constants = HashConstants.of(specs, device)
    results = {f"{n} tokens x 2 layers, us": round(microseconds(constants, n, device), 2) for n in TOKENS}
    print(results)
    print(save(f"ngram_hash_{device.type}", results))


if __name__ == "__main__":
    main()

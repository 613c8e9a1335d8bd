"""Drafts lie past the length of their own request, and nothing else of the history changes."""

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltagram.kernels._triton import Impl
from deltagram.kernels.place_drafts import place_drafts

ROWS, CONTEXT, MAX_DRAFT = 6, 20, 5
BODIES = ["reference", pytest.param("triton", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_drafts_follow_what_is_known(body: Impl, dtype: torch.dtype) -> None:
    device = torch.device("cuda" if body == "triton" else "cpu")
    for seed in range(50):
        draw = random.Random(seed)
        rows = draw.sample(range(ROWS - 1), draw.randint(1, ROWS - 1)) + [ROWS - 1] * draw.randint(0, 2)
        count = [0 if row == ROWS - 1 else draw.randint(0, MAX_DRAFT) for row in rows]
        lengths = [draw.randint(1, CONTEXT - MAX_DRAFT) for _ in range(ROWS)]
        drafts = torch.randint(100, 200, (len(rows), MAX_DRAFT + 2), dtype=dtype)[:, 1 : 1 + MAX_DRAFT]
        tokens = torch.randint(0, 9, (ROWS, CONTEXT), dtype=torch.int32)
        expected = tokens.clone()
        for n, (row, drafted) in enumerate(zip(rows, count, strict=True)):
            expected[row, lengths[row] : lengths[row] + drafted] = drafts[n, :drafted].int()
        int32 = {"dtype": torch.int32, "device": device}
        given = tokens.to(device)
        known = torch.tensor(lengths, **int32)
        place_drafts(drafts.to(device), torch.tensor(count, **int32), torch.tensor(rows, **int32), given, known, body)
        assert torch.equal(given.cpu(), expected), seed


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")
def test_the_kernels_under_the_interpreter() -> None:
    command = [sys.executable, str(Path(__file__).parent / "drafts_interpreted.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]

"""The history after a step is the one a loop over its sequences writes, with every body."""

import random

import pytest
import torch
from torch import Tensor

from deltagram.kernels._triton import Impl
from deltagram.kernels.commit_tokens import commit_tokens

ROWS, CONTEXT, MAX_DRAFT = 6, 40, 3
BODIES = ["reference", "compiled", pytest.param("triton", marks=pytest.mark.gpu)]


def step(seed: int) -> tuple[dict[str, Tensor], list[tuple[int, int, int, list[int]]]]:
    """Random sequences, some that sample nothing and padding; and (number, row, begin, sampled) of those that do."""
    draw = random.Random(seed)
    rows = draw.sample(range(ROWS - 1), draw.randint(0, ROWS - 1))
    tokens = torch.randint(
        0, 2, (ROWS, CONTEXT), generator=torch.Generator().manual_seed(seed)
    ).int()  # of two tokens: drafts agree often
    counts = [draw.choice([0, 1, 1 + draw.randint(0, MAX_DRAFT)]) for _ in rows]
    lengths = [draw.randint(MAX_DRAFT + 1, CONTEXT - 2) for _ in rows]
    sampled = [[draw.randint(0, 1) for _ in range(count)] for count in counts]
    spare = draw.randint(0, 2)
    flat = [token for each in sampled for token in each]
    ends = [sum(counts[:n]) for n in range(len(counts) + 1)]
    int32 = {"dtype": torch.int32}
    arguments = {
        "sampled": torch.tensor(flat + [9] * draw.randint(1, 3)),
        "cu_samples": torch.tensor(ends + [ends[-1]] * spare, **int32),
        "row": torch.tensor(rows + [ROWS - 1] * spare, **int32),
        "length": torch.tensor(lengths + [0] * spare, **int32),
        "num_draft": torch.tensor([max(count - 1, 0) for count in counts] + [0] * spare, **int32),
        "tokens": tokens,
        "lengths": torch.full((ROWS,), -5, **int32),
        "untaken": torch.arange(ROWS, **int32),
        "steps": torch.tensor([41]),
        "out": torch.full((len(rows) + spare, 2 + MAX_DRAFT), -7, **int32),
    }
    live = [(n, rows[n], lengths[n] - len(drawn) + 1, drawn) for n, drawn in enumerate(sampled) if drawn]
    return arguments, live


@pytest.mark.parametrize("body", BODIES)
def test_the_longest_agreeing_drafts_and_one_token_are_committed(body: Impl) -> None:
    device, seen = torch.device("cuda" if body == "triton" else "cpu"), set()
    for seed in range(200):
        arguments, live = step(seed)
        expected = {name: tensor.clone() for name, tensor in arguments.items()}
        expected["out"][:, 0], expected["steps"] = 0, torch.tensor([42])
        for n, row, begin, sampled in live:
            a = 0
            while a < len(sampled) - 1 and arguments["tokens"][row, begin + a] == sampled[a]:
                a += 1
            seen.add((len(sampled) - 1, a))
            expected["tokens"][row, begin + a] = sampled[a]
            expected["lengths"][row], expected["untaken"][row] = begin + a + 1, row + a
            expected["out"][n, : a + 2] = torch.tensor([a + 1, *sampled[: a + 1]])
        given = {name: tensor.to(device) for name, tensor in arguments.items()}
        commit_tokens(**given, impl=body)
        for name, tensor in given.items():
            assert torch.equal(tensor.cpu(), expected[name]), (seed, name)
    assert seen == {(drafts, a) for drafts in range(MAX_DRAFT + 1) for a in range(drafts + 1)}


@pytest.mark.parametrize("body", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
def test_synthetic_acceptance_has_the_mean_that_is_asked_for(body: Impl) -> None:
    device = torch.device("cuda" if body == "triton" else "cpu")
    for mean, drafts in ((3.5, 5), (1.0, 2), (2.25, 3), (4.0, 3)):
        counts, reports = [], []
        for impl in dict.fromkeys(("reference", body)):
            on = device if impl == body else torch.device("cpu")
            int32 = {"dtype": torch.int32, "device": on}
            history = torch.zeros(8, 300, **int32), torch.full((8,), 1, **int32), torch.zeros(8, **int32)
            ends = torch.arange(9, **int32) * (1 + drafts)
            rows, number = torch.arange(8, **int32), torch.full((8,), drafts, **int32)
            out, steps = torch.zeros(8, 2 + drafts, **int32), torch.zeros(1, dtype=torch.int64, device=on)
            total = 0
            for step in range(40):
                sampled = torch.arange(8 * (1 + drafts), device=on) + 100 * step
                length = history[1] + drafts
                if on.type == "cuda":
                    torch.cuda.synchronize()  # a step's table is older than what is launched right before
                commit_tokens(sampled, ends, rows, length, number, *history, steps, out, synthetic=mean)
                total += int(out[:, 0].sum())
                kept = [row[1 : 1 + row[0]] for row in out.tolist()]
                assert all(row == list(range(row[0], row[0] + len(row))) for row in kept)
                reports.append(kept)
                for n, row in enumerate(kept):
                    end = int(history[1][n])
                    assert history[0][n, end - len(row) : end].tolist() == row, "the history has what was reported"
            counts.append(total / 320)
        assert abs(counts[0] - min(mean, 1 + drafts)) < 0.06 and len(set(counts)) == 1, (mean, counts)
        assert reports[:40] == reports[-40:], "the rule is the same on every device"

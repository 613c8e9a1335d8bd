"""Steps that sample for requests of every kind, for the op's two bodies."""

import random

import torch
from torch import Tensor

from deltagram.kernels._triton import Impl
from deltagram.kernels.sample_tokens import (
    CONSTRAINED,
    DRAWN,
    FILTERED,
    PENALIZED,
    REPORTED,
    SPECIAL,
    Requests,
    Scratch,
    sample_tokens,
)
from deltagram.kernels.sample_tokens.pick_from_all import SUMS

ROWS, CONTEXT, LOGPROBS, EDITS = 9, 40, 5, 12


def requests(vocab: int, draw: random.Random) -> Requests:
    """What ROWS requests ask for."""
    made = Requests.empty(ROWS, vocab, EDITS, torch.device("cpu"))
    made.edits.view(torch.uint8).fill_(0x5A)  # past a row's own, anything
    made.allowed.random_(0, 256)
    made.allowed[:, 0] |= 1
    for row in range(ROWS):
        temperature = draw.choice([0.0, 0.3, 1.0, 2.5])
        top_k, top_p, min_p = draw.choice([0, 1, 3, 50]), draw.choice([1.0, 0.9, 0.2]), draw.choice([0.0, 0.05, 1e-6])
        penalties = draw.choice([(1.0, 0.0, 0.0), (1.3, 0.2, 0.7), (0.8, -0.5, 0.0)])
        edits, constrained, reported = draw.choice([0, 0, 7]), draw.random() < 0.3, draw.random() < 0.4
        flags = REPORTED * reported + CONSTRAINED * constrained
        if temperature:
            flags |= DRAWN | SPECIAL | (FILTERED if (top_k, top_p, min_p) != (0, 1.0, 0.0) else 0)
        if penalties[0] != 1.0:
            flags |= PENALIZED | SPECIAL
        if edits:
            flags |= SPECIAL
        count = draw.randint(1, LOGPROBS) if reported else 0
        made.whole[row] = torch.tensor([flags, draw.getrandbits(62), top_k, draw.randint(1, 20), edits, count])
        made.real[row] = torch.tensor([temperature, top_p, min_p, *penalties], dtype=torch.float64)
        made.edits[row, 0, :edits] = torch.tensor([draw.randrange(vocab) for _ in range(edits)], dtype=torch.int32)
        bias = torch.tensor([draw.choice([3.5, -2.0, -torch.inf]) for _ in range(edits)])
        made.edits[row, 1, :edits] = bias.view(torch.int32)
        made.edits[row, 2, :edits] = torch.tensor([draw.choice([0, 5, 10**6]) for _ in range(edits)]).int()
    return made


def step(vocab: int, dtype: torch.dtype, seed: int, spread: float) -> tuple[tuple[Tensor, ...], Requests]:
    """Logits of up to eight sequences, one that brings no sample and one that brings three, in a padded table."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    owners = draw.sample(range(ROWS), draw.randint(1, 8))
    counts = [draw.choice([0, 1, 1, 3]) for _ in owners]
    total, spare = sum(counts), draw.randint(0, 2)
    int32 = torch.int32
    tokens = sum(max(count, 1) for count in counts)
    sequence = [n for n, count in enumerate(counts) for _ in range(max(count, 1))]
    sampled = [t for t, n in enumerate(sequence) if counts[n]]
    position = [draw.randint(20, CONTEXT - 2) for _ in sequence]
    logits = torch.randn(total + spare, vocab, generator=generator) * spread
    logits = (logits * 4).round() / 4 if draw.random() < 0.5 else logits  # ties
    table = (
        torch.tensor(sampled + [0] * spare, dtype=int32),
        torch.tensor([sum(counts[:n]) for n in range(len(counts) + 1)] + [total] * 2, dtype=int32),
        torch.tensor(sequence + [-1] * 2, dtype=int32),
        torch.tensor(position + [0] * 2, dtype=int32),
        torch.tensor(owners + [ROWS - 1] * 2, dtype=int32),
        torch.randint(0, min(vocab, 30), (ROWS, CONTEXT), generator=generator, dtype=int32),
    )
    assert len(sequence) == tokens
    return (logits.to(dtype), *table), requests(vocab, draw)


def check(vocab: int, dtype: torch.dtype, seeds: range, device: torch.device, reference_on: torch.device) -> int:
    """Both bodies give the same tokens, bit for bit, and the log-probabilities agree; how many were drawn."""
    drawn, work = 0, {on: Scratch.of(40, vocab, LOGPROBS, on) for on in (device, reference_on)}
    for seed in seeds:
        given, asked = step(vocab, dtype, seed, [0.5, 4.0, 12.0][seed % 3])
        results = []
        bodies: list[tuple[torch.device, Impl]] = [(device, "triton"), (reference_on, "reference")]
        for on, body in bodies:
            here = Requests(*(part.to(on) for part in asked))
            logits, sampled, ends, sequence, position, row, history = (part.to(on) for part in given)
            table = sampled, ends, sequence, position, row
            results.append(sample_tokens(logits, *table, history, here, work[on], body))
        ours, expected = ([part.cpu() for part in result] for result in results)
        live = int(given[2][-1])
        assert torch.equal(ours[0][:live], expected[0][:live]), seed
        owner = given[5][given[3][given[1][:live].long()].long()].long()
        for n, row in enumerate(owner.tolist()):
            flags, count = int(asked.whole[row, 0]), int(asked.whole[row, 5])
            drawn += flags & DRAWN > 0
            if flags & REPORTED:
                assert torch.equal(ours[2][n, :count], expected[2][n, :count])
                torch.testing.assert_close(ours[1][n], expected[1][n], atol=2e-4, rtol=1e-5)
                torch.testing.assert_close(ours[3][n, :count], expected[3][n, :count], atol=2e-4, rtol=1e-5)
        left = work[device]
        assert not any(part.any() for part in (left.counts, left.unsettled, left.meeting[:, : SUMS + 2]))
    return drawn


def check_last_of_many(count: int, vocab: int, device: torch.device, reference_on: torch.device) -> None:
    """Both bodies give the same tokens, of `count` greedy sequences but for the last, which asks for all there is."""
    generator = torch.Generator().manual_seed(count)
    asked = Requests.empty(count, vocab, EDITS, torch.device("cpu"))
    flags = SPECIAL | PENALIZED | REPORTED | DRAWN | FILTERED
    asked.whole[-1] = torch.tensor([flags, 5, 50, 10, 0, LOGPROBS])
    asked.real[-1] = torch.tensor([2.0, 0.9, 0.0, 1.3, 0.2, 0.7], dtype=torch.float64)
    index, ends = torch.arange(count, dtype=torch.int32), torch.arange(count + 1, dtype=torch.int32)
    position = torch.randint(20, CONTEXT - 2, (count,), generator=generator, dtype=torch.int32)
    history = torch.randint(0, min(vocab, 30), (count, CONTEXT), generator=generator, dtype=torch.int32)
    logits, results = torch.randn(count, vocab, generator=generator), []
    bodies: list[tuple[torch.device, Impl]] = [(device, "triton"), (reference_on, "reference")]
    for on, body in bodies:
        here, work = Requests(*(part.to(on) for part in asked)), Scratch.of(count, vocab, LOGPROBS, on)
        x, one, end, at, text = (part.to(on) for part in (logits, index, ends, position, history))
        results.append([part.cpu() for part in sample_tokens(x, one, end, one, at, one, text, here, work, body)])
        assert not work.counts.any()
    ours, expected = results
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[2][-1], expected[2][-1])
    torch.testing.assert_close(ours[3][-1], expected[3][-1], atol=2e-4, rtol=1e-5)
    assert not torch.equal(ours[0], logits.argmax(-1)), "what the last sequence asks for must change its token"

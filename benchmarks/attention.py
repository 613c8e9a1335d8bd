"""Attention on a GPU, in a CUDA graph: decode, drafts, prompts and selected blocks, at the shape of a 4B model.

16 query heads over 4 key heads of 256, in bf16, gated, one layer; the indexed layer has 2 key heads, blocks of 64
tokens and 32 of them selected. A call works on pages of its own as far as the pool goes, so that small contexts do not
come from the L2 cache. "layer" is qkv_write and decode, one after the other as in a step. `floor_us` is the time that
keys and values take to be read once at 4.27 TB/s, or products at 800 TFLOP/s if that is longer.

    python benchmarks/attention.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from environment import save

from deltagram.kernels.paged_attention import paged_attention
from deltagram.kernels.qkv_write import qkv_write
from deltagram.kernels.select_blocks import select_blocks
from deltagram.step.plan import Kind
from deltagram.testing.timing import captured_us

HEADS, KEY_HEADS, SIZE, PAGE, WIDTH = 16, 4, 256, 64, 2048  # WIDTH: pages a request may have, 128k tokens
LISTED, INDEX_HEADS, INDEX_SIZE = 32, 4, 128
BYTES_PER_US, FLOP_PER_US = 4.27e6, 800e6
DEVICE = "cuda"


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def tables(pages: int, count: int, context: int, new: int, kind: Kind, call: int) -> tuple[torch.Tensor, ...]:
    """page_table, row, kind, cu_tokens, length, sequence and position of `count` like sequences, in the pages of the
    `call`-th call."""
    each = -(-context // PAGE)
    table = torch.zeros(count, WIDTH, dtype=torch.int32, device=DEVICE)
    table[:, :each] = (torch.arange(count * each, device=DEVICE).view(count, each) + call * count * each) % pages
    return (
        table,
        ints(list(range(count))),
        ints([int(kind)] * count),
        ints([n * new for n in range(count + 1)]),
        ints([context] * count),
        ints([n for n in range(count) for _ in range(new)]),
        ints([p for _ in range(count) for p in range(context - new, context)]),
    )


def attend(
    pools: torch.Tensor, count: int, context: int, new: int, kind: Kind, call: int, listed: int = 0
) -> Callable[[], object]:
    tokens = count * new
    q = torch.randn(tokens, HEADS, SIZE, device=DEVICE).bfloat16()
    gate = torch.randn(tokens, HEADS, 2 * SIZE, device=DEVICE).bfloat16()[..., SIZE:]
    step = tables(pools.shape[1], count, context, new, kind, call)
    chosen = None
    if listed:
        complete = (step[-1].cpu() + 1) // PAGE
        chosen = torch.stack([torch.randperm(int(blocks))[:listed] for blocks in complete]).int().to(DEVICE)
    drafts = 0 if kind is Kind.PREFILL else new - 1
    options = SIZE**-0.5, kind is Kind.PREFILL, drafts, chosen, PAGE, gate
    return partial(paged_attention, q, pools[0], pools[1], *step, *options)  # type: ignore[call-arg, arg-type]


def select(pages: int, count: int, context: int, new: int, kind: Kind, call: int) -> Callable[[], object]:
    keys = torch.randn(pages, 1, INDEX_SIZE, device=DEVICE).bfloat16()
    q = torch.randn(count * new, INDEX_HEADS, INDEX_SIZE, device=DEVICE).bfloat16()
    table, row, _, cu_tokens, length, _, position = tables(pages, count, context, new, kind, call)
    return partial(select_blocks, q, keys, table, row, cu_tokens, length, position, PAGE, LISTED)


def between(pools: torch.Tensor, tokens: int) -> Callable[[], object]:
    projected = torch.randn(tokens, (2 * HEADS + 2 * KEY_HEADS) * SIZE, device=DEVICE).bfloat16()
    q = projected[:, : 2 * HEADS * SIZE].unflatten(1, (HEADS, 2 * SIZE))[..., :SIZE]
    k, v = projected[:, 2 * HEADS * SIZE :].unflatten(1, (2 * KEY_HEADS, SIZE)).chunk(2, 1)
    weights, turns = torch.randn(2, SIZE, device=DEVICE), torch.randn(2, 4096, SIZE // 4, device=DEVICE)
    index = torch.arange(tokens, device=DEVICE)
    places = index.int(), index, ints([0, tokens])
    return partial(qkv_write, q, k, v, weights[0], weights[1], *turns, *places, pools[0], pools[1], 1e-6)  # type: ignore[call-arg, arg-type]


def layer(pools: torch.Tensor, count: int, context: int, call: int) -> Callable[[], object]:
    write = between(pools[:, -count:], count)  # pages that nobody attends to
    decode = attend(pools, count, context, 1, Kind.DECODE, call)

    def both() -> None:
        write()
        decode()

    return both


def floor_us(count: int, context: int, new: int, key_heads: int) -> float:
    seen = count * (context * new - new * (new - 1) / 2)  # keys, over all queries
    moved = count * context * key_heads * SIZE * 4
    return max(moved / BYTES_PER_US, seen * HEADS * SIZE * 4 / FLOP_PER_US)


def measure(pools: torch.Tensor) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def note(what: str, count: int, context: int, new: int, calls: list[Callable[[], object]], floor: float) -> None:
        row = {"what": what, "sequences": count, "context": context, "new": new, "us": captured_us(calls, 10)}
        rows.append(row | {"floor_us": floor})
        print(f"{what:16} {count:3} x {context:6} + {new:4} {row['us']:9.1f} us   floor {floor:9.1f}", flush=True)

    pages = pools.shape[1]

    def many(count: int, context: int) -> int:
        return max(1, min(32, pages // (count * -(-context // PAGE)), 2**25 // (count * context)))

    for count in (1, 8, 48):
        for context in (128, 1024, 8192, 131_072):
            calls = [attend(pools, count, context, 1, Kind.DECODE, i) for i in range(many(count, context))]
            note("decode", count, context, 1, calls, floor_us(count, context, 1, KEY_HEADS))
    for count in (1, 8, 48):
        for context in (64, 140, 250):
            calls = [layer(pools, count, context, i) for i in range(8)]
            note("layer", count, context, 1, calls, floor_us(count, context, 1, KEY_HEADS))
    for count, context in ((1, 1024), (1, 8192), (8, 8192)):
        calls = [attend(pools, count, context, 6, Kind.VERIFY, i) for i in range(many(count, context))]
        note("verify", count, context, 6, calls, floor_us(count, context, 6, KEY_HEADS))
    for count, context, new in ((1, 2048, 2048), (8, 256, 256), (1, 512, 512), (1, 8192, 2048), (1, 131_072, 2048)):
        calls = [attend(pools, count, context, new, Kind.PREFILL, i) for i in range(2)]
        note("prefill", count, context, new, calls, floor_us(count, context, new, KEY_HEADS))
    indexed = pools.view(2, -1, PAGE, KEY_HEADS // 2, SIZE)
    for count, context, new, kind in ((1, 131_072, 1, Kind.DECODE), (8, 131_072, 1, Kind.DECODE),
                                      (48, 8192, 1, Kind.DECODE), (1, 32_768, 2048, Kind.PREFILL)):  # fmt: skip
        seen = count * new * LISTED * PAGE
        moved = count * context // PAGE * INDEX_SIZE * 2  # each block's key once
        calls = [select(pages, count, context, new, kind, i) for i in range(4)]
        note("select_blocks", count, context, new, calls, moved / BYTES_PER_US)
        calls = [attend(indexed, count, context, new, kind, i, LISTED) for i in range(4 if new == 1 else 1)]
        moved = seen * KEY_HEADS // 2 * SIZE * 4 if new == 1 else 0
        note("selected", count, context, new, calls, max(moved / BYTES_PER_US, seen * HEADS * SIZE * 4 / FLOP_PER_US))
    for tokens in (1, 8, 48, 512, 2048):
        moved = tokens * (HEADS + 2 * KEY_HEADS) * SIZE * 4
        note("qkv_write", 1, tokens, tokens, [between(pools, tokens) for _ in range(8)], moved / BYTES_PER_US)
    return rows


def main() -> None:
    torch.manual_seed(0)
    free = torch.cuda.mem_get_info()[0]
    pages = min(48 * WIDTH, int(free * 0.6) // (2 * PAGE * KEY_HEADS * SIZE * 2))
    pools = torch.empty(2, pages, PAGE, KEY_HEADS, SIZE, dtype=torch.bfloat16, device=DEVICE)
    for pool in pools:
        pool.normal_()
    print(save("attention", measure(pools)))


if __name__ == "__main__":
    main()

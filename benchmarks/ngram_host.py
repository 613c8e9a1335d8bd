"""The way through the host, stage by stage, and ways to do it: a table of 28.6 GiB, 24 rows of 264 bytes a token, ids
that are new each time.

python benchmarks/ngram_host.py [--gib 28.6]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from environment import save

from deltagram.kernels._layouts import BITS, PIECE
from deltagram.kernels.flag_wait import flag_wait
from deltagram.kernels.host_ask import host_ask
from deltagram.kernels.row_lookup import row_lookup
from deltagram.ngram import host_step
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.host_gather import GatheredRows, GatherThreads
from deltagram.ngram.memory import HostMemory

CUDA = torch.device("cuda")
FORM = RowFormat(torch.float8_e4m3fn, 256, group=32)
TOKENS = (48, 384, 4096)
PINNED = host_step.chunks
BESIDE = torch.cuda.Stream()


def replayed(call: Callable[[], object], renew: Callable[[], object], rows: GatheredRows, rounds: int = 25) -> float:
    """Median device microseconds of a captured call, after `renew` each time."""
    call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        call()
    for _ in range(rounds):
        renew()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        rows.wake()
        torch.cuda._sleep(40_000)  # until the host has launched what follows
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return round(statistics.median(times[5:]), 1)


def called(call: Callable[[], object], renew: Callable[[], object], rounds: int = 25) -> dict[str, float]:
    """Wall-clock microseconds of calls made one by one, synchronised."""
    times = []
    for _ in range(rounds):
        renew()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return {
        "first": round(times[0], 1),
        "median": round(statistics.median(times[5:]), 1),
        "least": round(min(times), 1),
    }


def in_order(rows: GatheredRows, ids: torch.Tensor, out: torch.Tensor, chunks: Callable) -> None:
    """A lookup whose copies are made between the waits, on one stream."""
    host_ask(ids, rows.ids, rows.asked, rows.counters)
    for first, last in chunks(-(-len(ids) // PIECE)):
        flag_wait(rows.done[first:last], rows.counters[:1], rows.failed, host_step.POLLS)
        part = slice(first * PIECE, min(last * PIECE, len(ids)))
        out[part].copy_(rows.staged[part], non_blocking=True)


def partly_in_place(rows: GatheredRows, table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, part: float) -> None:
    """A lookup of which the device reads a part in place meanwhile."""
    cut = int(len(ids) * (1 - part)) // PIECE * PIECE
    current = torch.cuda.current_stream()
    BESIDE.wait_stream(current)
    with torch.cuda.stream(BESIDE):
        row_lookup(table, ids[cut:], out[cut:])
    rows.lookup(ids[:cut], None, None, out[:cut])
    current.wait_stream(BESIDE)


def even(size: int) -> Callable[[int], list[tuple[int, int]]]:
    return lambda pieces: [(first, min(first + size, pieces)) for first in range(0, pieces, size)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=28.6)
    num_rows = int(parser.parse_args().gib * 2**30) // FORM.row_bytes
    memory = HostMemory(num_rows * FORM.row_bytes, CUDA)
    table = memory.bytes.view(num_rows, -1)
    results: dict[str, Any] = {"rows": num_rows}
    for count in (14, 12):
        threads = GatherThreads(count)
        rows = GatheredRows(table, FORM, CUDA, threads=threads)
        found = results[f"{count} threads"] = {}
        for tokens in TOKENS:
            ids = torch.randint(num_rows, (tokens * 24,), device=CUDA)
            out = torch.empty(tokens * 24, FORM.row_bytes, dtype=torch.uint8, device=CUDA)
            pieces = -(-len(ids) // PIECE)

            def renew(ids: torch.Tensor = ids) -> None:
                ids.random_(num_rows)

            def ask_and_wait(ids: torch.Tensor = ids, pieces: int = pieces, rows: GatheredRows = rows) -> None:
                host_ask(ids, rows.ids, rows.asked, rows.counters)
                flag_wait(rows.done[:pieces], rows.counters[:1], rows.failed, host_step.POLLS)

            def copy(ids: torch.Tensor = ids, out: torch.Tensor = out, rows: GatheredRows = rows) -> None:
                out.copy_(rows.staged[: len(ids)], non_blocking=True)

            def look_up(ids: torch.Tensor = ids, out: torch.Tensor = out, rows: GatheredRows = rows) -> None:
                rows.lookup(ids, None, None, out)

            one = found[f"{tokens} tokens"] = {}
            one["gathered, not copied"] = replayed(ask_and_wait, renew, rows)
            one["copied alone"] = replayed(copy, renew, rows)
            ways = {"as pinned": PINNED}
            if count == 14:
                ways |= {f"{size} pieces": even(size) for size in (48, 64, 128, 256) if size < pieces}
            for way, chunks in ways.items():
                host_step.chunks = chunks
                one[f"copied beside, {way}"] = replayed(look_up, renew, rows)
                call = partial(in_order, rows, ids, out, chunks)
                one[f"copied between waits, {way}"] = replayed(call, renew, rows)
            host_step.chunks = PINNED
            for part in (0.06, 0.1, 0.14, 0.18):
                call = partial(partly_in_place, rows, table, ids, out, part)
                one[f"{part:.0%} in place meanwhile"] = replayed(call, renew, rows)
            one["called"] = called(look_up, renew)
            time.sleep(0.5)
            one["called, helpers were asleep"] = called(look_up, renew, 8)
            print(count, tokens, one, flush=True)
        rows.check()
        assert int(rows.asked) >> BITS == int(rows.counters[0])
        rows.close()
        threads.close()
    print(save("ngram_host", results))


if __name__ == "__main__":
    main()

"""Placements on a GPU: a table of 28.6 GiB, 24 rows of 264 bytes a token, random ids on the device, rows on the
device at the end.

`captured` replays a graph of several lookups with the ids it was captured with, `replayed` one of a single lookup with
new ids each time, so that neither the host's caches nor the device's translations know its rows.

python benchmarks/ngram_store.py [--gib 28.6]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import save

from deltagram.ngram.cached import CachedStore
from deltagram.ngram.disk import DiskStore
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.stores import DeviceStore, HostStore
from deltagram.testing.ngram import random_table, write_segments
from deltagram.testing.timing import captured_us

CUDA = torch.device("cuda")
FORM = RowFormat(torch.float8_e4m3fn, 256, group=32)
TOKENS = (1, 6, 48, 384, 4096)


def random_ids(num_rows: int, num_tokens: int) -> torch.Tensor:
    return torch.randint(num_rows, (num_tokens, 24), device=CUDA)


def zipf_ids(num_rows: int, num_tokens: int) -> torch.Tensor:
    """Ranks of a Zipf law with exponent 1.1, scattered over the table."""
    uniform = torch.rand(num_tokens, 24, device=CUDA, dtype=torch.float64)
    rank = (uniform * (num_rows**-0.1 - 1) + 1).pow(-10).long().clamp(max=num_rows) - 1
    return (rank * 0x9E3779B1) % num_rows


def captured(store: Any, dtype: torch.dtype | None, draw: Callable, num_tokens: int, sets: int = 12) -> float:
    """Device microseconds of a lookup, each of several id sets captured in one graph."""
    calls = []
    for _ in range(sets if num_tokens < 4096 else 3):
        ids = draw(store.num_rows, num_tokens)
        width = FORM.row_bytes if dtype is None else FORM.dim
        out = torch.empty(num_tokens, 24, width, dtype=dtype or torch.uint8, device=CUDA)
        calls.append(partial(store.lookup, ids, dtype, out))
    return round(captured_us(calls, replays=7), 2)


def replayed(store: Any, draw: Callable, num_rows: int, num_tokens: int) -> float:
    """Device microseconds of a captured lookup whose ids are new at each replay: the median."""
    ids, times = draw(num_rows, num_tokens), []
    out = torch.empty(num_tokens, 24, FORM.row_bytes, dtype=torch.uint8, device=CUDA)
    store.lookup(ids, None, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store.lookup(ids, None, out)
    for _ in range(25):
        ids.copy_(draw(num_rows, num_tokens))
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        store.wake()
        torch.cuda._sleep(40_000)  # until the host has launched what follows
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    store.check()
    return round(statistics.median(times[5:]), 1)


def wall(
    lookup: Callable[..., torch.Tensor], draw: Callable, num_rows: int, num_tokens: int, rounds: int = 16
) -> dict[str, float]:
    """Wall-clock microseconds from ids on the device to rows there, synchronised: the first call apart."""
    out = torch.empty(num_tokens, 24, FORM.row_bytes, dtype=torch.uint8, device=CUDA)
    times = []
    for _ in range(rounds):
        ids = draw(num_rows, num_tokens)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        lookup(ids, None, out)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return {"first us": round(times[0], 1), "median us": round(statistics.median(times[1:] or times), 1)}


def host_table(num_rows: int, source: torch.Tensor) -> tuple[HostStore, dict[str, float]]:
    begin = time.perf_counter()
    store = HostStore(num_rows, FORM, CUDA)
    registered = time.perf_counter() - begin
    step = (1 << 30) // FORM.row_bytes
    for first in range(0, num_rows, step):
        store.table[first : first + step].copy_(source[first : first + step])
    return store, {
        "map and register s": round(registered, 1),
        "copy in s": round(time.perf_counter() - begin - registered, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=28.6)
    num_rows = int(parser.parse_args().gib * 2**30) // FORM.row_bytes
    results: dict[str, Any] = {"rows": num_rows, "GiB": round(num_rows * FORM.row_bytes / 2**30, 2)}

    device = DeviceStore(num_rows, FORM, CUDA)
    device.table.view(-1).view(torch.int64).random_()
    for name, dtype in (("stored bytes", None), ("bf16", torch.bfloat16)):
        results[f"device, {name}, us"] = {n: captured(device, dtype, random_ids, n) for n in TOKENS}
    print(results, flush=True)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    host, results["host table"] = host_table(num_rows, device.table)
    results["host table"]["peak device MiB while loading"] = (torch.cuda.max_memory_allocated() - before) >> 20
    ids = random_ids(num_rows, 384)
    want = device.lookup(ids, None)
    host.crossover = 1 << 40
    assert torch.equal(host.lookup(ids, None), want) and torch.equal(host.gather(ids, None), want)
    results["host in place, random ids, us"] = {n: captured(host, None, random_ids, n, 6) for n in TOKENS}
    results["host in place, Zipf ids, us"] = {n: captured(host, None, zipf_ids, n, 6) for n in TOKENS[2:]}
    results["host in place, new ids, us"] = {n: replayed(host, random_ids, num_rows, n) for n in TOKENS}
    host.crossover = 0
    results["host gathered, new ids, us"] = {n: replayed(host, random_ids, num_rows, n) for n in TOKENS[2:]}
    results["host gathered, not captured"] = {n: wall(host.gather, random_ids, num_rows, n) for n in TOKENS[2:]}
    time.sleep(1)  # helpers sleep
    results["host gathered, helpers asleep"] = {n: wall(host.gather, random_ids, num_rows, n, 1) for n in TOKENS[2:]}
    host.crossover = None
    results["host, as it chooses"] = {n: wall(host.lookup, random_ids, num_rows, n) for n in TOKENS}
    results["host, crossover in rows"] = host.crossover
    print(results, flush=True)

    cached = CachedStore(host, (2 << 30) // FORM.row_bytes, CUDA)
    host.crossover = 1 << 40
    for _ in range(100):
        cached.lookup(zipf_ids(num_rows, 4096), None)
    cached.hits.zero_(), cached.lookups.zero_()
    ids = zipf_ids(num_rows, 4096)
    assert torch.equal(cached.lookup(ids, None), device.lookup(ids, None))
    results["cached 2 GiB over host, Zipf ids"] = {
        "hit share": round(int(cached.hits) / int(cached.lookups), 3),
        "us": {n: captured(cached, None, zipf_ids, n, 6) for n in TOKENS},
    }

    with tempfile.TemporaryDirectory() as folder:
        table = random_table(FORM, (1 << 30) // FORM.row_bytes)
        disk = DiskStore(len(table), FORM, write_segments(FORM, table, Path(folder)), CUDA)
        results["disk, 1 GiB in the page cache"] = {
            n: wall(disk.lookup, random_ids, disk.num_rows, n) for n in TOKENS[:4]
        }
        results["disk in a graph, us"] = {n: replayed(disk, random_ids, disk.num_rows, n) for n in TOKENS[:3]}
        disk.close()
    print(results)
    print(save("ngram_store", results))


if __name__ == "__main__":
    main()

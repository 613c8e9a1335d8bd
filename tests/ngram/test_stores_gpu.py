"""Placements on a GPU: the bits of the CPU, in graphs too, with the device memory that each of them says."""

import socket
import subprocess
import sys
import time

import pytest
import torch

from deltagram.ngram.formats import RowFormat
from deltagram.ngram.helpers import HelperError
from deltagram.ngram.host_gather import GatheredRows, GatherThreads
from deltagram.ngram.host_step import FetchedRows
from deltagram.ngram.spec import HashConstants
from deltagram.ngram.stores import HostStore, SharedStore
from deltagram.testing.ngram import FORMATS, filled_store, random_table, same_bits
from deltagram.testing.ngram_checkpoints import engram_hashes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = 300
PLACEMENTS = ("device", "host", "shared", "disk", "cached:1KiB:device", "cached:1KiB:host", "cached:1KiB:disk")


def table_bytes(form: RowFormat) -> torch.Tensor:
    return random_table(form, ROWS, seed=form.row_bytes)


def made(placement: str, form: RowFormat, folder, table=None, device=CPU):
    return filled_store(placement, form, table_bytes(form) if table is None else table, folder, device)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_the_bits_of_the_cpu(placement, form, tmp_path):
    table = table_bytes(form)
    store, plain = made(placement, form, tmp_path, table, CUDA), made("device", form, tmp_path, table)
    for crossover in (0, 1 << 30):  # through the host, and in place
        if isinstance(store, HostStore):
            store.crossover = crossover
        ids = torch.randint(-1, ROWS, (700, 3))
        ids[5:9] = ids[0]
        for dtype in (None, torch.bfloat16, torch.float32):
            for _ in range(2):
                assert same_bits(store.lookup(ids.cuda(), dtype).cpu(), plain.lookup(ids, dtype)), (crossover, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [64, 200, 1 << 17])
def test_lookups_larger_than_their_buffers(capacity):
    form = FORMATS["ue8m0"]
    table = table_bytes(form)
    rows, plain = GatheredRows(table, form, CUDA, capacity), made("device", form, None)
    for count in (1, 1999, 20_000):
        ids = torch.randint(-1, ROWS, (count,))
        assert torch.equal(rows.lookup(ids.cuda(), None, None).cpu(), plain.lookup(ids, None))
        assert same_bits(rows.lookup(ids.cuda(), torch.bfloat16, None).cpu(), plain.lookup(ids, torch.bfloat16))
    rows.check()
    rows.close()


STEPS = {
    "device": "device",
    "host, in place": "host",
    "host, gathered": "host",
    "shared, gathered": "shared",
    "disk": "disk",
    "cached host, in place": "cached:4KiB:host",
    "cached host, gathered": "cached:4KiB:host",
    "cached disk": "cached:4KiB:disk",
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("num_tokens", [3, 60])
def test_a_captured_step_reads_the_tokens_of_its_own_replay(name, num_tokens, tmp_path):
    """Hash and lookup in one graph, replayed for many steps whose tokens change: each has the rows of its own tokens,
    whether the host is awake or not, and those of the plain table bit by bit."""
    form, (spec, *_) = FORMATS["ue8m0"], engram_hashes()
    table = random_table(form, spec.num_rows)
    store = filled_store(STEPS[name], form, table, tmp_path, CUDA)
    plain = filled_store("device", form, table, None, CPU)
    below = getattr(store, "below", store)
    if isinstance(below, HostStore):
        below.crossover = 0 if "gathered" in name else 1 << 30
    vocabulary = len(spec.token_map)
    history = torch.zeros(2, 200, dtype=torch.int32, device=CUDA)
    sequence, row = (torch.zeros(n, dtype=torch.int32, device=CUDA) for n in (num_tokens, 1))
    position = torch.arange(num_tokens, dtype=torch.int32, device=CUDA)
    constants, on_host = HashConstants.of([spec], CUDA), HashConstants.of([spec], CPU)

    def step() -> torch.Tensor:
        return store.lookup(constants.ids(history, sequence, row, position)[0], torch.bfloat16)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out = step()
    for turn in range(30):
        text = torch.randint(vocabulary, (2, 200), dtype=torch.int32)
        first = turn % 100
        history.copy_(text)
        position.copy_(torch.arange(first, first + num_tokens))
        sequence[-1] = -1 if turn % 4 == 0 else 0  # padding
        if turn % 2:
            store.wake()
        graph.replay()
        torch.cuda.synchronize()
        store.check()
        ids = on_host.ids(text, *(each.cpu() for each in (sequence, row, position)))[0]
        assert same_bits(out.cpu(), plain.lookup(ids, torch.bfloat16)), turn
        time.sleep(0.01 * (turn % 3))


@pytest.mark.gpu
def test_replays_one_after_the_other_without_waiting():
    """Steps launched while the last one still runs: the host serves them in order, and no step sees another's rows."""
    form = FORMATS["ue8m0"]
    table = table_bytes(form)
    store, plain = made("host", form, None, table, CUDA), made("device", form, None, table)
    store.crossover = 0
    ids, outs = torch.zeros(500, dtype=torch.int64, device=CUDA), []
    store.lookup(ids, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = store.lookup(ids, None)
    news = [torch.randint(-1, ROWS, (500,)) for _ in range(50)]
    on_device = [new.cuda() for new in news]
    for new in on_device:
        ids.copy_(new)
        graph.replay()
        outs.append(out.clone())
    torch.cuda.synchronize()
    store.check()
    for new, found in zip(news, outs, strict=True):
        assert torch.equal(found.cpu(), plain.lookup(new, None))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gathered", "fetched"])
def test_helpers_that_end_between_replays_are_an_error_within_five_seconds(kind):
    form = FORMATS["bf16"]
    table = table_bytes(form)
    if kind == "fetched":
        rows = FetchedRows(lambda ids, into: into.zero_(), form, CUDA, 64)
    else:
        rows = GatheredRows(table, form, CUDA, 64, GatherThreads(2))
    ids = torch.zeros(8, dtype=torch.int64, device=CUDA)
    rows.lookup(ids, None, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.lookup(ids, None, None)
    graph.replay()
    torch.cuda.synchronize()
    rows.check()
    if kind == "fetched":
        rows.close()
        rows.thread.join()
    else:
        rows.threads.close()
    begin = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(HelperError, match=r"did not bring the rows|has died"):
        rows.check()
    assert time.monotonic() - begin < 5 and int(rows.failed) == 1


@pytest.mark.gpu
def test_large_lookups_beside_a_step_do_not_starve_its_small_ones():
    """4 GiB of rows: three lookups of 98304 rows on a stream of their own, two milliseconds of them, and amid them one
    of 144 rows, as a decoding step has, which must not wait for them."""
    form, num_rows = RowFormat(torch.float8_e4m3fn, 256, 32), (4 << 30) // 264
    store = HostStore(num_rows, form, CUDA, crossover=1 << 14)
    small, large = (torch.randint(num_rows, (n,), device=CUDA) for n in (144, 98304))
    outs = [torch.empty(len(ids), 264, dtype=torch.uint8, device=CUDA) for ids in (small, large)]
    graphs = []
    for ids, out, count in ((small, outs[0], 1), (large, outs[1], 3)):
        store.lookup(ids, None, out)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(count):
                store.lookup(ids, None, out)
    beside, alone, amid = torch.cuda.Stream(priority=0), [], []
    for turn in range(40):
        small.random_(num_rows)
        store.wake()
        torch.cuda.synchronize()
        if turn % 2:
            with torch.cuda.stream(beside):
                graphs[1].replay()
            time.sleep(3e-4)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        graphs[0].replay()
        marks[1].record()
        marks[1].synchronize()
        assert not turn % 2 or not beside.query(), "the large lookups were over"
        torch.cuda.synchronize()
        (amid if turn % 2 else alone).append(marks[0].elapsed_time(marks[1]) * 1e3)
    store.check()
    alone_us, amid_us = (sorted(times)[len(times) // 2] for times in (alone, amid))
    print(f"a small lookup takes {alone_us:.0f} us alone and {amid_us:.0f} us amid large ones")
    assert amid_us < alone_us + 150


@pytest.mark.gpu
def test_a_host_table_takes_no_device_memory_but_staging():
    """The remedy for tables built on the device first. 1 GiB of rows; what the device sees is the staging."""
    form, rows = RowFormat(torch.float8_e4m3fn, 256, 32), (1 << 30) // 264
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    store = HostStore(rows, form, CUDA)
    store.table.fill_(3)
    ids = torch.randint(rows, (4096, 24), device=CUDA)
    for dtype in (None, torch.bfloat16):
        store.gather(ids, dtype)
    out = ids.numel() * (264 + 512) + ids.nbytes
    assert torch.cuda.max_memory_allocated() - before < out + (1 << 20)
    assert store.memory.nbytes == rows * 264


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_in_place():
    form = RowFormat(torch.float8_e4m3fn, 256, 32)
    rows = (1 << 31) // 264 + 100
    store = HostStore(rows, form, CUDA, crossover=1 << 30)
    store.table[-90:] = torch.randint(256, (90, 264), dtype=torch.uint8)
    last = torch.arange(rows - 90, rows, device=CUDA)
    assert torch.equal(store.lookup(last, None).cpu(), store.table[-90:])
    in_place = store.lookup(last, torch.float32)
    assert same_bits(in_place.cpu(), store.gather(last, torch.float32).cpu())


_READER = """
import socket, sys, torch
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.stores import SharedStore
source = socket.socket(fileno=int(sys.argv[1]))
store = SharedStore.receive(source, 300, RowFormat(torch.bfloat16, 20), torch.device("cuda"), 60)
ids = torch.arange(300, device="cuda")
for crossover in (0, 1000):
    store.crossover = crossover
    print(int(store.lookup(ids, None).long().sum()), flush=True)
"""


@pytest.mark.gpu
def test_a_second_process_reads_the_shared_table_in_place():
    store = made("shared", FORMATS["bf16"], None, None, CUDA)
    assert isinstance(store, SharedStore)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _READER, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
    theirs.close()
    store.send(ours)
    assert [int(line) for line in process.stdout] == [int(table_bytes(FORMATS["bf16"]).long().sum())] * 2

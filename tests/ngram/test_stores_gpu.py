"""Placements on a GPU: the bits of the CPU, in graphs too, with the device memory that each of them says."""

import socket
import subprocess
import sys
import time

import pytest
import torch

from deltagram.ngram import host_step, stores
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.helpers import HelperError
from deltagram.ngram.host_step import HostStep
from deltagram.ngram.stores import HostStore, SharedStore
from deltagram.testing.ngram import FORMATS, filled_store, random_table, same_bits

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
def test_pieces_wrap_around_the_staging(monkeypatch):
    monkeypatch.setattr(stores, "CHUNK", 50)
    form = FORMATS["ue8m0"]
    store = made("host", form, None, None, CUDA)
    ids = torch.randint(-1, ROWS, (1999,))
    want = made("device", form, None).lookup(ids, None)
    assert torch.equal(store.gather(ids.cuda(), None).cpu(), want)
    assert store._staging.host.shape == (8, 50, form.row_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["device", "host", "shared", "disk", "cached:2KiB:host", "cached:2KiB:disk"])
def test_replays_read_the_ids_of_their_own_step(placement, tmp_path):
    """The remedy for stale staging: ids are read, and rows fetched, at every replay."""
    form = FORMATS["ue8m0"]
    table = table_bytes(form)
    store, plain = made(placement, form, tmp_path, table, CUDA), made("device", form, tmp_path, table)
    below = getattr(store, "below", store)
    if placement.endswith("disk"):
        below.reserve(60)
    assert store.capturable
    ids = torch.zeros(20, 3, dtype=torch.int64, device=CUDA)
    store.lookup(ids, torch.bfloat16)  # compiles
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = store.lookup(ids, torch.bfloat16)
    for _ in range(20):
        new = torch.randint(-1, ROWS, (20, 3))
        ids.copy_(new)
        graph.replay()
        assert same_bits(out.cpu(), plain.lookup(new, torch.bfloat16))
    if placement.endswith("disk"):
        below.in_graphs.check()


@pytest.mark.gpu
def test_a_helper_that_dies_between_replays_is_an_error_within_five_seconds():
    form = FORMATS["bf16"]
    step = HostStep(lambda ids, into: into.zero_(), form, CUDA, 8)
    ids = torch.zeros(8, dtype=torch.int64, device=CUDA)
    step.lookup(ids, None, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.lookup(ids, None, None)
    graph.replay()
    torch.cuda.synchronize()
    step.check()
    step.close()
    step.thread.join()
    begin = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(HelperError, match="has died or is stuck"):
        step.check()
    assert time.monotonic() - begin < 5 and int(step.failed) == 1


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
    assert torch.cuda.max_memory_allocated() - before < out + stores.CHUNK * 264 * 2 + (1 << 20)
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


def test_the_host_step_on_a_cpu():
    """The same code without a GPU: each lookup gets its own rows, errors come out, a dead helper is named."""
    form = FORMATS["ue8m0"]
    table = table_bytes(form)
    plain = made("device", form, None, table)
    step = HostStep(lambda ids, into: plain.lookup(ids, None, into), form, CPU, 60)
    for _ in range(10):
        ids = torch.randint(-1, ROWS, (20, 3))
        assert same_bits(step.lookup(ids, torch.bfloat16, None), plain.lookup(ids, torch.bfloat16))
        assert torch.equal(step.lookup(ids[:4], None, None), plain.lookup(ids[:4], None))
    step.check()
    with pytest.raises(ValueError, match="a captured lookup of 61 rows; 60 were reserved"):
        step.lookup(torch.zeros(61, dtype=torch.int64), None, None)
    step.fetch = lambda ids, into: 1 / 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_step, "POLLS", 2000)
        step.lookup(ids, None, None)
    with pytest.raises(ZeroDivisionError):
        step.check()
    dead = HostStep(lambda ids, into: None, form, CPU, 1)
    dead.close()
    dead.thread.join(timeout=5)
    with pytest.raises(HelperError, match="fetching rows for graphs has died"):
        dead.check()

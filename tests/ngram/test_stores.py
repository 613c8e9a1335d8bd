"""Every placement gives the bits of the plain table, and fails loudly where it cannot."""

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltagram.kernels._layouts import HELD
from deltagram.kernels.host_ask import host_ask
from deltagram.kernels.row_lookup import row_lookup
from deltagram.ngram import disk, helpers, host_step, memory
from deltagram.ngram.cached import CachedStore
from deltagram.ngram.disk import DiskStore, Segment
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.helpers import HelperError, Workers
from deltagram.ngram.host_gather import GatheredRows, GatherThreads
from deltagram.ngram.host_step import FetchedRows
from deltagram.ngram.placement import Placement, make_store, table_of
from deltagram.ngram.stores import DeviceStore, HostStore, SharedStore
from deltagram.testing.ngram import FORMATS, filled_store, random_table, same_bits, write_segments

CPU = torch.device("cpu")
ROWS = 300
PLACEMENTS = ("device", "host", "shared", "disk", "cached:1KiB:device", "cached:1KiB:disk")


def table_bytes(form: RowFormat) -> torch.Tensor:
    return random_table(form, ROWS, seed=form.row_bytes)


def made(placement: str, form: RowFormat, folder, table=None):
    return filled_store(placement, form, table_bytes(form) if table is None else table, folder, CPU)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_the_same_bits_from_everywhere(placement, form, tmp_path):
    table = table_bytes(form)
    store, plain = made(placement, form, tmp_path, table), made("device", form, tmp_path, table)
    for _ in range(3):  # a cache answers differently the second time
        ids = torch.randint(-1, ROWS, (40, 3))
        ids[5:9] = ids[0]
        packed = table[ids.clamp(min=0)] * (ids >= 0)[..., None]
        assert torch.equal(store.lookup(ids, None), packed)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert same_bits(store.lookup(ids, dtype), plain.lookup(ids, dtype))
            out = torch.full((40, 3, form.dim), torch.nan, dtype=dtype)  # every element must be written
            assert store.lookup(ids, dtype, out) is out and same_bits(out, plain.lookup(ids, dtype))
    assert store.lookup(torch.empty(0, 3, dtype=torch.int64), None).shape == (0, 3, form.row_bytes)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(-1, ROWS - 1), min_size=1, max_size=30), min_size=1, max_size=12), st.integers(1, 9)
)
def test_a_cache_never_changes_a_bit(lookups, slots):
    form = FORMATS["ue8m0"]
    store = CachedStore(made("device", form, None), slots, CPU)
    table = table_of(store).table.clone()
    known = 0
    for wanted in lookups:
        ids = torch.tensor(wanted)
        assert torch.equal(store.lookup(ids, None), table[ids.clamp(min=0)] * (ids >= 0)[:, None])
        known += int((ids >= 0).sum())
        held = store.slots[:, HELD]
        assert torch.equal(store.rows[held >= 0], table[held[held >= 0]])  # each slot holds the row it claims
    assert int(store.lookups) == known and 0 <= int(store.hits) <= known


def test_a_cache_keeps_what_is_hot():
    store = CachedStore(made("device", FORMATS["bf16"], None), 50, CPU)
    hot = torch.arange(40)
    for step in range(20):
        store.lookup(torch.cat([hot, 50 + torch.randint(0, 250, (10,))]) if step else hot, None)
    assert int(store.hits) > 0.9 * 19 * 40


def test_a_cache_reads_only_what_it_lacks(tmp_path):
    store = made("cached:64KiB:disk", FORMATS["bf16"], tmp_path)
    ids = torch.arange(100)
    store.lookup(ids, None)
    store.lookup(ids, None)
    assert store.below.rows_read == 100 and int(store.hits) == 100


def test_duplicates_are_read_once(tmp_path):
    store = made("disk", FORMATS["bf16"], tmp_path)
    store.lookup(torch.tensor([[7, 7, 7], [7, 200, -1]]), None)
    assert store.rows_read == 2


def test_reads_are_many_at_a_time(tmp_path, monkeypatch):
    """Four threads must be reading at once, or the barrier breaks; and each asks for all its rows before it waits."""
    store, together, read = made("disk", FORMATS["bf16"], tmp_path), threading.Barrier(4), os.preadv
    monkeypatch.setattr(disk, "_JOB", 25)
    asked, logs = os.posix_fadvise, defaultdict(list)

    def uncached(descriptor, buffers, offset, flags=0):
        if flags:
            raise BlockingIOError
        log = logs[threading.get_ident()]
        if "read" not in log:
            together.wait(timeout=3)
        log.append("read")
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", uncached)
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: logs[threading.get_ident()].append("ask") or asked(*a))
    found = store.lookup(torch.arange(100), None)
    assert torch.equal(found, table_bytes(FORMATS["bf16"])[:100])
    assert list(logs.values()) == [["ask"] * 25 + ["read"] * 25] * 4


def test_disk_memory_is_bounded(tmp_path, monkeypatch):
    """A lookup of many rows is done in pieces of CHUNK rows."""
    monkeypatch.setattr(disk, "CHUNK", 8)
    store, sizes = made("disk", FORMATS["bf16"], tmp_path), []
    fetch = store.fetch
    monkeypatch.setattr(store, "fetch", lambda ids, into: sizes.append(len(ids)) or fetch(ids, into))
    ids = torch.arange(100)
    assert torch.equal(store.lookup(ids, None), table_bytes(FORMATS["bf16"])[:100])
    assert max(sizes) == 8 and sum(sizes) == 100


def test_a_table_beyond_the_memory_budget_is_served_from_disk(tmp_path):
    """64 MiB of rows, an address space with room for far less: the disk serves them, memory does not hold them."""
    rows, width = 1 << 20, 64
    np.arange(rows * width // 8, dtype=np.int64).tofile(tmp_path / "t.bin")
    code = f"""
import resource, torch
from pathlib import Path
from deltagram.ngram.disk import DiskStore, Segment
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.stores import HostStore
form, cpu = RowFormat(torch.bfloat16, {width // 2}), torch.device("cpu")
segment = Segment("t", Path({str(tmp_path / "t.bin")!r}), 0, 0, {rows}, 0, {width})
disk = DiskStore({rows}, form, [segment], cpu)
disk.lookup(torch.zeros(1, dtype=torch.int64), None)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20),) * 2)
ids = torch.randint({rows}, (4096,))
got = disk.lookup(ids, None).view(torch.int64)
assert torch.equal(got, ids[:, None] * {width // 8} + torch.arange({width // 8}))
try:
    HostStore({rows}, form, cpu)
except OSError:
    print("refused")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("refused\n", 0), result.stderr[-2000:]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda s: s[:-1], "hold 101 rows; expected 300"),
        (lambda s: s[1:], "expected 40 from byte 0, from row 0 on"),
        (lambda s: [*s[:2], Segment("late", s[2].file, 5, 101, 199, 0, 40)], "late ends after its file"),
        (lambda s: [*s, Segment("wide", s[0].file, 4, 0, 100, 40, 8)], "hold 100 rows"),
    ],
)
def test_files_that_are_not_the_table_are_refused(spoil, problem, tmp_path):
    form = FORMATS["bf16"]
    with pytest.raises(ValueError, match=problem):
        DiskStore(ROWS, form, spoil(write_segments(form, table_bytes(form), tmp_path)), CPU)


def test_a_file_cut_short_later_is_named(tmp_path):
    store = made("disk", FORMATS["bf16"], tmp_path)
    os.truncate(tmp_path / "0-101.bin", 100)
    with pytest.raises(ValueError, match=r"0-101.bin ended while row 250 of part.0.101"):
        store.lookup(torch.tensor([3, 250]), None)
    assert torch.equal(
        store.lookup(torch.tensor([3]), None), table_bytes(FORMATS["bf16"])[3:4]
    )  # the rest still serves


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_or_stuck_reader_is_an_error_within_five_seconds(tmp_path, monkeypatch):
    store = made("disk", FORMATS["bf16"], tmp_path)
    begin = time.monotonic()
    monkeypatch.setattr(os, "preadv", lambda *_: sys.exit())  # ends the thread that calls it
    with pytest.raises(HelperError, match=r"reading rows from disk .* has died"):
        store.lookup(torch.arange(5), None)
    monkeypatch.undo()
    with pytest.raises(HelperError, match="has died"):  # and it stays broken, rather than slow
        store.lookup(torch.arange(5), None)
    assert time.monotonic() - begin < 2
    monkeypatch.setattr(helpers, "PATIENCE", 0.5)
    stuck, release = made("disk", FORMATS["bf16"], tmp_path), threading.Event()
    monkeypatch.setattr(os, "preadv", lambda *_: release.wait())
    with pytest.raises(HelperError, match=r"no helper thread finished anything for 0.5 s; 1 of 1"):
        stuck.lookup(torch.arange(5), None)
    release.set()


def test_patience_is_within_five_seconds():
    assert helpers.PATIENCE < 5


def test_workers_raise_a_jobs_own_error_and_go_on():
    workers, done = Workers(2, "counting"), []
    with pytest.raises(ZeroDivisionError):
        workers.run([lambda: 1 / 0, lambda: time.sleep(0.05)])
    workers.run([lambda: done.append(1)] * 5)
    assert len(done) == 5
    workers.close()


# Shared between processes

_READER = """
import socket, sys, torch, time, os
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.stores import SharedStore
source = socket.socket(fileno=int(sys.argv[1]))
print("waits", flush=True)
try:
    form = RowFormat(torch.float8_e4m3fn, 20, table_scale=True)
    store = SharedStore.receive(source, 300, form, torch.device("cpu"), 20)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    sys.exit()
print(int(store.table.long().sum()), float(store.scale), "rw-s" in open("/proc/self/maps").read(), flush=True)
time.sleep(float(sys.argv[2]))
"""


def reader(end: socket.socket, sleep: float = 0.0) -> subprocess.Popen:
    """A process that has imported what it needs and waits for the table."""
    command = [sys.executable, "-c", _READER, str(end.fileno()), str(sleep)]
    process = subprocess.Popen(command, pass_fds=[end.fileno()], stdout=subprocess.PIPE, text=True)
    end.close()
    assert process.stdout.readline() == "waits\n"
    return process


def test_one_copy_for_all_processes_and_nothing_left_of_a_killed_one():
    form = FORMATS["one scale"]
    store = made("shared", form, None)
    before = set(os.listdir("/dev/shm"))
    ours, theirs = socket.socketpair()
    process = reader(theirs, sleep=60)
    store.send(ours)
    total, scale, writable = process.stdout.readline().split()
    assert (int(total), writable) == (int(store.table.long().sum()), "False")
    assert float(scale) == float(store.scale)
    process.kill()
    process.wait()
    assert set(os.listdir("/dev/shm")) == before
    assert torch.equal(store.lookup(torch.arange(ROWS), None), table_bytes(form))


def test_a_writer_that_dies_is_an_error_and_not_a_wait():
    ours, theirs = socket.socketpair()
    process = reader(theirs)
    begin = time.monotonic()
    ours.close()  # what the kernel does for a killed writer
    assert "ended before the table was complete" in process.stdout.read()
    assert time.monotonic() - begin < 5


def test_a_writer_that_never_sends_is_an_error():
    ours, theirs = socket.socketpair()
    with pytest.raises(HelperError, match=r"within 0.2 s"):
        SharedStore.receive(theirs, ROWS, FORMATS["bf16"], CPU, timeout=0.2)
    ours.close()


def test_a_shared_table_of_another_size_is_refused():
    ours, theirs = socket.socketpair()
    made("shared", FORMATS["bf16"], None).send(ours)
    with pytest.raises(ValueError, match=r"300 rows of 40 bytes; expected \(301, 40\)"):
        SharedStore.receive(theirs, ROWS + 1, FORMATS["bf16"], CPU, timeout=5)


# By way of the host: the same code on a CPU, whose calling thread waits in the device's place


def gathered(threads: int, capacity: int = 1000) -> tuple[GatheredRows, torch.Tensor]:
    form = FORMATS["ue8m0"]
    table = table_bytes(form)
    return GatheredRows(table, form, CPU, capacity, GatherThreads(threads)), table


@pytest.mark.parametrize(("threads", "capacity"), [(1, 200), (3, 1 << 15)])
@pytest.mark.parametrize("kind", ["gathered", "fetched"])
def test_rows_by_way_of_the_host(kind, threads, capacity):
    """Fewer rows than a piece, more than a chunk, more than there is room for; and after the helpers have slept."""
    form = FORMATS["ue8m0"]
    rows, table = gathered(threads, capacity)
    if kind == "fetched":
        rows = FetchedRows(lambda ids, into: row_lookup(table, ids, into), form, CPU, capacity)
    plain = made("device", form, None)
    for count in (1, 0, 64, 190, 1000, 20_000, 3):
        ids = torch.randint(-1, ROWS, (count,))
        assert torch.equal(rows.lookup(ids, None, None), plain.lookup(ids, None))
        assert same_bits(rows.lookup(ids, torch.bfloat16, None), plain.lookup(ids, torch.bfloat16))
        time.sleep(0.02)
    rows.check()
    rows.close()


def test_a_large_lookup_does_not_hold_up_a_small_one():
    """The remedy for large lookups that starve decoding: threads take a piece of each lookup in turn. The small one's
    table is the memory where the large one's pieces are noted: its rows say how many were done when it was served."""
    threads = GatherThreads(1)
    threads.close()  # until both are asked for
    native, state = threads.native, threads.state
    form = RowFormat(torch.float32, 128)
    large = GatheredRows(torch.zeros(1, 512, dtype=torch.uint8), form, CPU, 1 << 14, threads)
    small = GatheredRows(large.done.view(torch.uint8).view(-1, 512), form, CPU, 64, threads)
    ids = torch.zeros(1 << 14, dtype=torch.int64)
    host_ask(ids, large.ids, large.asked, large.counters)
    host_ask(torch.arange(4), small.ids, small.asked, small.counters)
    state[native.STOP] = 0
    thread = threading.Thread(target=native.serve, args=(0, state.data_ptr()))
    thread.start()
    while not (large.done.all() and small.done.all()):
        time.sleep(1e-3)
    state[native.STOP] = 1
    thread.join()
    assert len(large.done) == 256 and int((small.staged[:4].view(torch.int64) != 0).sum()) <= 2


def test_a_lookup_whose_helpers_are_gone_is_an_error_within_five_seconds(monkeypatch):
    monkeypatch.setattr(host_step, "POLLS", 2000)
    rows, _ = gathered(2)
    begin = time.monotonic()
    rows.threads.close()
    assert not any(thread.is_alive() for thread in rows.threads.threads)
    rows.lookup(torch.arange(5), None, None)
    with pytest.raises(HelperError, match="the host did not bring the rows of a lookup"):
        rows.check()
    rows.close()
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("kind", ["gathered", "fetched"])
def test_after_rows_that_were_late_lookups_go_on_once_nobody_is_behind(kind, monkeypatch):
    monkeypatch.setattr(host_step, "POLLS", 200)
    threads = GatherThreads(1)
    threads.close()  # nobody serves the first lookup
    native, state, form = threads.native, threads.state, FORMATS["ue8m0"]
    table, late = table_bytes(form), threading.Event()
    if kind == "fetched":
        rows = FetchedRows(lambda ids, into: late.wait() and row_lookup(table, ids, into), form, CPU, 64)
    else:
        rows = GatheredRows(table, form, CPU, 64, threads)
    rows.lookup(torch.arange(5), None, None)
    for _ in range(2):
        with pytest.raises(HelperError, match="the host did not bring the rows"):
            rows.check()
    late.set()
    state[native.STOP] = 0
    helper = threading.Thread(target=native.serve, args=(0, state.data_ptr()))
    helper.start()
    while int(rows.done[0]) < 1:
        time.sleep(1e-3)
    if kind == "gathered":
        other = state[native.BUSY + 8 * 7 :]
        other[0] = rows._place + 1  # one more thread, that has not got on
        with pytest.raises(HelperError):
            rows.check()
        assert int(rows.failed) == 1
        other[0] = 0
    with pytest.raises(HelperError):  # that lookup was void
        rows.check()
    monkeypatch.setattr(host_step, "POLLS", 100_000)
    ids = torch.arange(7, 0, -1)
    assert torch.equal(rows.lookup(ids, None, None), table[ids])
    rows.check()
    rows.close()
    state[native.STOP] = 1
    helper.join()


def test_what_threads_read_is_let_go():
    """A table without lookups is not kept, and threads that serve nothing can still end."""
    rows, table = gathered(2)
    rows.lookup(torch.arange(5), None, None)
    gone = weakref.ref(table)
    threads = rows.threads
    del rows, table
    gc.collect()
    assert gone() is None
    threads.close()


def test_a_fetch_that_fails_is_the_lookups_error(monkeypatch):
    monkeypatch.setattr(host_step, "POLLS", 2000)
    rows = FetchedRows(lambda ids, into: 1 / 0, FORMATS["bf16"], CPU, 64)
    rows.lookup(torch.arange(5), None, None)
    with pytest.raises(ZeroDivisionError):
        rows.check()
    dead = FetchedRows(lambda ids, into: None, FORMATS["bf16"], CPU, 64)
    dead.close()
    dead.thread.join(timeout=5)
    with pytest.raises(HelperError, match="fetching rows for the device has died"):
        dead.check()


# Host memory


def test_host_memory_has_exactly_the_size_asked_for():
    """PyTorch's page-locked memory would take 8 MiB for 5."""
    before = mapped_bytes()
    held = memory.HostMemory(5 << 20, CPU)
    assert held.bytes.nbytes == 5 << 20 and mapped_bytes() - before <= (5 << 20) + (1 << 20)


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


class Driver:
    """Refuses registrations above `limit` bytes, and keeps those it made."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if size > self.limit:
            return 2
        self.held[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.held[address]
        return 0


@pytest.mark.parametrize("limit", [1 << 20, 300_000, 70_000])
def test_a_registration_too_large_for_the_driver_is_made_in_pieces(limit, monkeypatch):
    driver = Driver(limit)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(memory, "PIECE", 1 << 17)
    if limit < memory.PIECE:
        with pytest.raises(RuntimeError, match="CUDA did not lock 400000 bytes"):
            memory.HostMemory(400_000, torch.device("cuda"))
        assert not driver.held
        return
    held = memory.HostMemory(400_000, torch.device("cuda"))
    covered = held.bytes.data_ptr()
    for address, size in sorted(driver.held.items()):
        assert address == covered
        covered += size
    assert covered == held.bytes.data_ptr() + 400_000 and len(driver.held) == (1 if limit > 400_000 else 4)
    del held
    gc.collect()
    assert not driver.held


def test_numa_lists_and_interleaving(monkeypatch):
    assert memory.numa_nodes("0-2,5\n") == [0, 1, 2, 5]
    held = memory.HostMemory(1 << 20, CPU)
    with pytest.warns(UserWarning, match="mbind"):  # this machine has no node 63, so the kernel was asked
        memory.interleave(held.bytes, [62, 63])


def test_a_host_table_is_never_built_on_the_device():
    store = HostStore(ROWS, FORMATS["bf16"], CPU)
    assert store.table.data_ptr() == store.memory.bytes.data_ptr()


# Names


def test_placement_names():
    assert Placement.parse("cached:2GiB:host") == Placement("host", 2 << 30)
    assert [str(Placement.parse(text)) for text in ("disk", "cached:9:shared")] == ["disk", "cached:9:shared"]
    for wrong in ("gpu", "cached:host", "cached:1GB:host", "cached:1GiB:cached:1GiB:host", "", 5, None):
        with pytest.raises(ValueError, match="ngram_placement is"):
            Placement.parse(wrong)
    with pytest.raises(ValueError, match="a cache of 0 rows"):
        make_store(Placement("device", 3), ROWS, FORMATS["bf16"], CPU)


@pytest.mark.parametrize(
    "wrong", [(torch.int8, 4), (torch.bfloat16, 64, 32), (torch.float32, 4, 0, True), (torch.float8_e4m3fn, 40, 32)]
)
def test_formats_that_no_kernel_reads_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        RowFormat(*wrong)
    assert DeviceStore(3, RowFormat(torch.float8_e4m3fn, 256, 32), CPU).table.shape == (3, 264)

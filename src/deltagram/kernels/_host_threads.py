"""The host's answer to host_ask.py, for tables in its memory: threads that gather rows, without the GIL, for all boxes.

A box is a table and the buffers of its lookups. A thread takes one piece of each box that has any, and again: a large
lookup holds up nobody else's, and a thread that wakes up late nobody at all. It asks for AHEAD rows before it copies
one, as random rows are as far away as memory is. The threads' state and boxes are int64 words:

    state    STOP, BELL (times it was rung), PLACES ... (addresses of boxes, 0 for none), BUSY ... (8 a thread, for
             a line of memory of its own: the place it is at, plus one)
    box      addresses of the table, of the ids, of the staged rows, of the word `asked`, and of a word a piece, DONE,
             that becomes the lookup's number when the piece is staged; bytes of a row; NEXT, like `asked`: the piece to
             be taken
"""

from __future__ import annotations

from deltagram.kernels._compiled import compiled, inlined
from deltagram.kernels._layouts import BITS, PIECE
from deltagram.kernels._shared_words import (
    clear,
    copy,
    doze,
    give_way,
    look,
    post,
    relax,
    request,
    sleep_at,
    swap,
    wake_at,
)
from deltagram.kernels._vectors import get_long

BOXES, MOST_THREADS = 64, 64
STOP, BELL, PLACES = 0, 8, 16
BUSY = PLACES + BOXES
STATE_WORDS = BUSY + 8 * MOST_THREADS
TABLE, IDS, STAGED, ASKED, DONE, ROW_BYTES, NEXT, BOX_WORDS = 0, 1, 2, 3, 4, 5, 8, 16
AHEAD = 16  # rows
_SPINS, _YIELDS = 400, 2000  # rounds without work before a thread lets others run, and before it sleeps: some 0.5 ms
_LONG = 50_000  # rounds, about a second of them asleep, before thread 0 sleeps longer


@inlined
def _request_row(table, row, row_bytes):  # type: ignore[no-untyped-def]
    if row >= 0:
        start = table + row * row_bytes
        for at in range(0, row_bytes, 64):
            request(start + at)
        request(start + row_bytes - 1)


@inlined
def _gather(box, piece):  # type: ignore[no-untyped-def]
    table, row_bytes = get_long(box, TABLE), get_long(box, ROW_BYTES)
    ids, to = get_long(box, IDS) + 8 * piece * PIECE, get_long(box, STAGED) + piece * PIECE * row_bytes
    for i in range(AHEAD):
        _request_row(table, get_long(ids, i), row_bytes)
    for i in range(PIECE):
        if i + AHEAD < PIECE:
            _request_row(table, get_long(ids, i + AHEAD), row_bytes)
        row = get_long(ids, i)
        if row >= 0:
            copy(to + i * row_bytes, table + row * row_bytes, row_bytes)
        else:
            clear(to + i * row_bytes, row_bytes)


@inlined
def _serve_one(box, state):  # type: ignore[no-untyped-def]
    """Gather one piece of the box's lookup, if one is left: whether there may be more."""
    at = box + 8 * NEXT
    asked, taken = look(get_long(box, ASKED)), look(at)
    lookup = asked >> BITS
    if taken >> BITS > lookup or (taken >> BITS == lookup and taken >= asked):
        return False
    if taken >> BITS == lookup:
        wanted = taken
    else:
        wanted = lookup << BITS
    if swap(at, taken, wanted + 1):
        piece = wanted & ((1 << BITS) - 1)
        _gather(box, piece)
        post(get_long(box, DONE) + 8 * piece, lookup)
    return True


@compiled
def serve(thread: int, state: int) -> None:
    """A thread's life, until STOP. Thread 0 looks for lookups every few microseconds; the others sleep until it, or a
    caller, rings."""
    idle = 0
    while look(state + 8 * STOP) == 0:
        rung, found = look(state + 8 * BELL), False
        for place in range(BOXES):
            at, busy = state + 8 * (PLACES + place), state + 8 * (BUSY + 8 * thread)
            box = look(at)
            if box == 0:
                continue
            post(busy, place + 1)
            if look(at) == box and _serve_one(box, state):
                found = True
            post(busy, 0)
        if found:
            if thread == 0 and idle > _YIELDS:
                post(state + 8 * BELL, rung + 1)
                wake_at(state + 8 * BELL)
            idle = 0
        elif rung != look(state + 8 * BELL):
            idle = 0
        else:
            idle += 1
            if idle <= _SPINS:
                relax()
            elif idle <= _YIELDS:
                give_way()
            elif thread == 0:
                doze(20 if idle < _LONG else 1000)
            else:
                sleep_at(state + 8 * BELL, rung)
                idle = 0


@compiled
def ring(state: int) -> None:
    """Wake the threads: a lookup will come."""
    rung = look(state + 8 * BELL)
    while not swap(state + 8 * BELL, rung, rung + 1):
        rung = look(state + 8 * BELL)
    wake_at(state + 8 * BELL)

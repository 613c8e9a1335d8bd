"""The ranks that run one model together: joining them, deciding for them, and what moves data between them.

Ranks are processes, started by parallel/launch.py or by torchrun. What gates a collective is decided by rank 0, or
from host state that all ranks share; the host's own group (gloo) carries such decisions, and every user of device
collectives has a communicator of its own, for one stream.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deltagram.parallel import watchdog
from deltagram.parallel.shared_memory import shared_memory

T = TypeVar("T")
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(hours=24)  # idle ranks wait for work; the watchdog is who ends a hang
_LOOK = timedelta(seconds=0.2)
_START = 120.0  # seconds that ranks wait for the last of them to come
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13's name, and before


class DisagreementError(RuntimeError):
    """Ranks that must do the same are about to do different things."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process among the `size` of its group, all of them on one machine."""

    rank: int
    size: int

    @staticmethod
    def from_environment() -> "Place":
        """As torchrun and parallel/launch.py say. Raises ValueError where they do not."""
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise ValueError(
                f"the environment lacks {', '.join(missing)}; expected a process that torchrun or `--ranks` started"
            )
        rank, size, local_size = (int(os.environ[name]) for name in _VARIABLES[:3])
        if local_size != size:
            raise ValueError(f"{size} ranks of which {local_size} are on this machine; expected all of them on one")
        return Place(rank, size)


def device_of(name: str, place: Place) -> torch.device:
    """The device of a process: "cpu", "cuda" for a card each, or "cuda:N" for one card that all share.

    Raises ValueError for cards that the machine has not.
    """
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; expected cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if device.index is None and place.size > count:
        raise ValueError(f"{place.size} ranks asked for, this machine has {count} CUDA devices")
    if device.index is not None and device.index >= count:
        raise ValueError(f"device {name!r} asked for, this machine has {count} CUDA devices")
    return torch.device("cuda", place.rank if device.index is None else device.index)


class Group:
    """This process's view of the group that it joined.

    shared_card: whether several of its ranks run on one card. deadline: seconds that a step may take, from which all
    that waits derives its limit.
    """

    def __init__(self, place: Place, device: torch.device, shared_card: bool, deadline: float) -> None:
        self.place, self.device, self.shared_card, self.deadline = place, device, shared_card, deadline
        self.rank, self.size = place.rank, place.size
        memory = shared_memory(self, watchdog.nbytes(self.size), "the watchdog's memory")
        self.watchdog = watchdog.Watchdog(self.rank, self.size, deadline, memory)
        assert dist.group.WORLD is not None
        self._host = Communicator("agreement", 0, dist.group.WORLD, self, on_device=False)
        self._communicators = [self._host]

    def broadcast_decision(self, value: T) -> T:
        """Rank 0's `value`, on every rank. Others' are ignored."""
        held: list[Any] = [value]
        dist.broadcast_object_list(held, 0)
        return held[0]

    def gather_objects(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        held: list[Any] = [None] * self.size
        dist.all_gather_object(held, value)
        return held

    def gather_numbers(self, values: list[int]) -> list[list[int]]:
        """Numbers (int64) of all ranks, as many of each, in their order, on every rank: once a step."""
        mine = torch.tensor(values, dtype=torch.int64)
        everyone = mine.new_empty(self.size, len(values))
        self._host.all_gather(everyone, mine)
        return everyone.tolist()  # type: ignore[no-any-return]

    def check_same(self, digests: list[int], what: str) -> None:
        """Raises DisagreementError, on every rank, unless all gave the same of the `digests`, which were gathered along
        with other numbers."""
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            ranks = ", ".join(map(str, others))
            raise DisagreementError(f"rank {ranks} has another {what} than rank 0; nothing of it was run")

    def check(self, problem: str | None) -> None:
        """Raises ValueError, the same one on every rank, if any rank has a problem: what was asked for cannot be."""
        found = self.gather_objects(problem)
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(found):
            if each is not None:
                ranks.setdefault(each, []).append(rank)
        if ranks:
            self.watchdog.close()  # all of them leave now
            raise ValueError("\n".join(_where(at, self.size) + each for each, at in ranks.items()))

    def communicator(self, name: str) -> "Communicator":
        """A new communicator over all ranks, for one user on one stream. Every rank makes the same, in one order."""
        backend = "nccl" if self.device.type == "cuda" and not self.shared_card else "gloo"
        index = len(self._communicators)
        assert index < watchdog.COMMUNICATORS
        process_group = dist.new_group(backend=backend, timeout=_PATIENCE)
        self._communicators.append(Communicator(name, index, process_group, self, backend == "nccl"))
        return self._communicators[-1]

    def barrier(self) -> None:
        """Every rank has come here."""
        self.gather_numbers([0])

    def close(self) -> None:
        """Leave the group; every rank does. Its threads have ended then: one that the interpreter's end cuts short can
        abort the process."""
        self.watchdog.close()
        for communicator in self._communicators:
            del communicator.process_group
        dist.destroy_process_group()


class Communicator:
    """Collectives over a group for one user. Each is noted with the watchdog, which names it should it not end."""

    def __init__(self, name: str, index: int, process_group: dist.ProcessGroup, group: Group, on_device: bool) -> None:
        self.name, self.index, self.group, self.on_device = name, index, group, on_device
        self.rank, self.size = group.rank, group.size
        self.process_group = process_group
        self._stream: torch.cuda.Stream | None = None
        self._ended: tuple[Tensor, Tensor] | None = None  # int64 [1] on the device and on the host: entries that ended
        self._entries = 0
        if on_device:
            group.watchdog.abort_with(process_group.abort)

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """out [ranks, ...]: the `part` [...] of every rank."""
        self._run("all-gather", _all_gather, out, part)

    def all_to_all(self, out: Tensor, parts: Tensor) -> None:
        """out [ranks, ...]: of every rank, the one of its `parts` [ranks, ...] that is for this one."""
        self._run("all-to-all", dist.all_to_all_single, out, parts)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Around work between collectives: an error here is made known, as the other ranks would wait for this one."""
        try:
            yield
        except Exception as error:
            self.group.watchdog.fail(error)
            raise

    @contextmanager
    def entered(self, kind: str, device: torch.device) -> Iterator[None]:
        """Around whatever waits for the other ranks on this communicator's stream: the watchdog notes it, and its end
        on the device."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._stream = self._stream or stream
            assert stream == self._stream, f"{self.name} belongs to another stream: give this one its own"
        with self.group.watchdog.collective(self.index, f"{self.name} {kind}") as record:
            yield
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._note_end(device, record)

    def _note_end(self, device: torch.device, record: tuple[int, int, int]) -> None:
        """Have the device count this entry, when its stream comes here, where the watchdog reads it without the driver:
        an event's query can wait, with the interpreter's lock, for a copy that waits for a stopped rank."""
        if self._ended is None:
            with torch.inference_mode(False):  # or they could be written to in that mode alone
                zero = torch.zeros(1, dtype=torch.int64)
                self._ended = zero.to(device), zero.pin_memory()
        self._entries += 1
        entries, (counted, seen) = self._entries, self._ended
        seen.copy_(counted.add_(1), non_blocking=True)
        number = seen.numpy()
        self.group.watchdog.ends_when(lambda: bool(number[0] >= entries), record)

    def _run(self, kind: str, collective: Callable[..., Any], out: Tensor, part: Tensor) -> None:
        with self.entered(kind, part.device):
            if self.on_device:
                collective(out.view(-1), part.reshape(-1), group=self.process_group)
                return
            received = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
            work = collective(received.view(-1), part.cpu().reshape(-1), group=self.process_group, async_op=True)
            self._wait(work)
            if received is not out:  # several ranks on one card, for which NCCL has no collective
                out.copy_(received)

    def _wait(self, work: Any) -> None:
        """For the end of a collective on the host, or for the watchdog's report."""
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                self.group.watchdog.check()


def join(device: str = "cpu", deadline: float = 10.0) -> Group:
    """Join the group that the environment describes, at start-up. Returns once every rank has.

    device: see `device_of`. Raises ValueError, on every rank, for more than the machine has, or if a rank is missing.
    """
    place = Place.from_environment()
    chosen = device_of(device, place)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("gloo", store=_meet(place), rank=place.rank, world_size=place.size, timeout=_PATIENCE)
    shared_card = chosen.type == "cuda" and torch.device(device).index is not None and place.size > 1
    return Group(place, chosen, shared_card, deadline)


def _meet(place: Place) -> dist.Store:
    """What the ranks of a group know each other by, once all have come. Raises ValueError on those that came if one
    does not: the watchdog, which looks for missing ones from then on, needs them all."""
    begun, came = time.monotonic(), 1
    hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun does it itself

    def absence() -> str:
        waited = time.monotonic() - begun
        return f"{came} of {place.size} ranks came in {waited:.1f} s; expected all of them within {_START:g} s"

    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=hosts,
            timeout=timedelta(seconds=_START),
            wait_for_workers=False,
            multi_tenant=True,
        )
        came = store.add("ranks that came", 1)
        while came < place.size and time.monotonic() < begun + _START:
            time.sleep(0.05)
            came = store.add("ranks that came", 0)
    except dist.DistError as error:  # whoever keeps the count is not there, or has given up
        raise ValueError(f"{absence()}: {error}") from error
    if came < place.size:
        raise ValueError(absence())
    store.set_timeout(_PATIENCE)
    return store


def everywhere(group: Group | None, make: Callable[[], T]) -> T:
    """`make()`, on every rank; what one of them refuses with a ValueError all do. A process may be alone: None."""
    if group is None:
        return make()
    try:
        made = make()
    except ValueError as error:
        group.check(str(error))
        raise
    group.check(None)
    return made


def number_of(digest: str) -> int:
    """A digest of 16 hexadecimal digits as an int64."""
    return int.from_bytes(bytes.fromhex(digest), "big", signed=True)


def _where(ranks: list[int], size: int) -> str:
    return "" if len(ranks) == size else f"rank {', '.join(map(str, ranks))}: "

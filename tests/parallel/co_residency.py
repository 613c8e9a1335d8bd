"""Ranks each with a main stream whose collective spins and, beside it, a chain that gathers: run by
test_co_residency.py and, for its figures, by hand.

python co_residency.py RANKS ROUNDS capped|uncapped              one process plays all ranks, on one card
python co_residency.py RANKS ROUNDS capped|uncapped processes    a process and a card each

Every round is a part of a captured graph: the side stream gathers the projected values of 1..32 requests x 6 tokens
while the main stream gathers hidden states. Prints one line of JSON.
"""

import json
import os
import sys
import time

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # fewer queues than streams would make some wait for others

import torch

from deltagram.kernels.lamport_gather import ROUND, WORDS
from deltagram.parallel.groups import Group, join
from deltagram.parallel.lamport import FOOTPRINT, LamportAllGather, blocks_beside
from deltagram.parallel.launch import launch
from deltagram.parallel.peer_memory import PeerMemory, peer_memory, virtual_ranks
from deltagram.parallel.residency import DeviceResources, Spinner, fits
from deltagram.testing.ngram import same_bits
from deltagram.testing.virtual import streams

SIZES = tuple(6 * requests for requests in range(1, 33))
PROJECTED, HIDDEN = 25600, 4096
MAIN_BLOCKS, POLLS = 4, 1_000_000
CUDA = torch.device("cuda")


class Rank:
    """One rank's gathers, inputs, outputs and the graph of a round of each size."""

    def __init__(self, memory: PeerMemory, hidden_memory: PeerMemory, blocks: int) -> None:
        ranks, bf16 = memory.ranks, torch.bfloat16
        self.ranks, self.replays = ranks, 0
        self.side = LamportAllGather(memory, SIZES[-1], PROJECTED // ranks, bf16, blocks, POLLS)
        self.main = LamportAllGather(hidden_memory, SIZES[-1], HIDDEN // ranks, bf16, MAIN_BLOCKS, POLLS)
        self.part, self.state = (given(memory.rank, width // ranks) for width in (PROJECTED, HIDDEN))
        self.out = torch.empty(SIZES[-1], PROJECTED, dtype=bf16, device=CUDA)
        self.mixed = torch.empty(SIZES[-1], HIDDEN, dtype=bf16, device=CUDA)
        self.beside = torch.cuda.Stream()

    def round(self, rows: int) -> None:
        main = torch.cuda.current_stream()
        self.beside.wait_stream(main)
        with torch.cuda.stream(self.beside):
            self.part[:rows].neg_()
            self.side.gather(self.part[:rows], self.out[:rows])
        self.main.gather(self.state[:rows], self.mixed[:rows])
        main.wait_stream(self.beside)

    def warm(self) -> None:
        """Compile and load everything, with waits that give up at once."""
        for gather in (self.side, self.main):
            gather.polls = 0
        self.round(SIZES[-1])
        torch.cuda.synchronize()
        for gather in (self.side, self.main):
            gather.polls = POLLS

    def capture(self) -> None:
        self.part.neg_()  # the warm-up's
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for rows in SIZES:
                self.round(rows)

    def replay(self) -> None:
        self.graph.replay()
        self.replays += 1

    def wrong(self) -> int:
        """Of the two outputs that the last replay left."""
        turns = torch.tensor([len(SIZES) - row // 6 for row in range(SIZES[-1])], device=CUDA) * self.replays
        sign = (1 - 2 * (turns % 2)).bfloat16()[:, None]
        parts, states = ([given(r, width // self.ranks) for r in range(self.ranks)] for width in (PROJECTED, HIDDEN))
        wanted = torch.cat(parts, 1) * sign, torch.cat(states, 1)
        return sum(not same_bits(*pair) for pair in zip((self.out, self.mixed), wanted, strict=True))

    def stalled(self) -> bool:
        return bool(self.side.stalled) or bool(self.main.stalled)


def given(rank: int, width: int) -> torch.Tensor:
    """A rank's inputs, the same wherever they are asked for. None is zero, whose sign would not be kept."""
    drawn = torch.randint(1, 1 << 15, (SIZES[-1], width), generator=torch.Generator().manual_seed(rank))
    return (drawn.bfloat16() / 1024).to(CUDA)


def play(ranks: int, rounds: int, capped: bool, group: Group | None) -> dict:
    """Of all ranks; or, with a group, of this process's."""
    resources = DeviceResources.of(CUDA)
    here = ranks if group is None else 1
    main = [Spinner(f"main stream {rank}", MAIN_BLOCKS, FOOTPRINT) for rank in range(here)]
    guests = [resources.whole()]  # a product of the main stream may need a multiprocessor for itself
    blocks = blocks_beside(CUDA, main, here) if capped else 1 << 20
    needed = -(-SIZES[-1] * PROJECTED // 2 // WORDS)
    spinners = main + [Spinner("side", min(blocks, needed), FOOTPRINT)] * here
    sizes = [LamportAllGather.nbytes(ranks, SIZES[-1], width // ranks, torch.bfloat16) for width in (PROJECTED, HIDDEN)]
    if group is None:
        memories = [virtual_ranks(size, ranks, CUDA) for size in sizes]
    else:
        memories = [[peer_memory(size, group)] for size in sizes]
    players = [Rank(side, hidden, blocks) for side, hidden in zip(*memories, strict=True)]
    for player in players:
        player.warm()
        for gather in (player.side, player.main):
            gather.release()
    for player in players:
        for gather in (player.side, player.main):
            gather.take_back()
        player.capture()
    torch.cuda.synchronize()
    if group is not None:
        group.barrier()
    wrong, began, looks = 0, time.perf_counter(), max(1, rounds // len(SIZES) // 10)
    for replay in range(-(-rounds // len(SIZES))):
        for player, stream in zip(players, streams(here, CUDA), strict=True):
            with torch.cuda.stream(stream):
                player.replay()
        if (replay + 1) % looks == 0:
            torch.cuda.synchronize()
            if any(player.stalled() for player in players):
                break
            wrong += sum(player.wrong() for player in players)
            if group is not None:
                group.barrier()  # nobody replays while another still compares
    torch.cuda.synchronize()
    taken = time.perf_counter() - began
    return {
        "ranks": ranks,
        "cards": 1 if group is None else ranks,
        "capped": capped,
        "blocks a rank": min(blocks, needed),
        "fits": fits(resources, spinners, guests if capped else ()),
        "stalled": any(player.stalled() for player in players),
        "rounds": int(players[0].side.state[ROUND]),
        "wrong": wrong,
        "seconds": round(taken, 3),
        "us a round": round(taken / (players[0].replays * len(SIZES)) * 1e6, 1),
    }


def main() -> None:
    ranks, rounds, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if sys.argv[4:] == ["processes"] and "RANK" not in os.environ:
        sys.exit(launch(sys.argv, ranks))
    group = join("cuda", deadline=60.0) if "RANK" in os.environ else None
    found = play(ranks, rounds, how == "capped", group)
    if group is None or group.rank == 0:
        print(json.dumps(found), flush=True)
    if group is not None:
        group.check(None if found["wrong"] == 0 else f"{found['wrong']} outputs are wrong")
        group.close()


if __name__ == "__main__":
    main()

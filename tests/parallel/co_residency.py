"""Ranks that one process plays on one card, each with a main stream whose collective spins and a chain beside it that
gathers: run by test_co_residency.py and, for its figures, by hand.

python co_residency.py RANKS ROUNDS [capped | uncapped]

Every round is a part of a captured graph: the side stream gathers the projected values of 1..32 requests x 6 tokens
while the main stream gathers hidden states. Prints one line of JSON.
"""

import json
import os
import sys
import time

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # fewer queues than streams would make some wait for others

import torch

from deltagram.kernels.lamport_gather import ROUND
from deltagram.parallel.lamport import FOOTPRINT, LamportAllGather, blocks_beside
from deltagram.parallel.peer_memory import virtual_ranks
from deltagram.parallel.residency import DeviceResources, Spinner, fits
from deltagram.testing.ngram import same_bits
from deltagram.testing.virtual import streams

SIZES = tuple(6 * requests for requests in range(1, 33))
PROJECTED, HIDDEN = 25600, 4096
MAIN_BLOCKS, POLLS = 4, 1_000_000
CUDA = torch.device("cuda")


class Rank:
    """One rank's gathers, inputs, outputs and the graph of a round of each size."""

    def __init__(self, rank: int, memories: list, hidden_memories: list, blocks: int) -> None:
        ranks, bf16 = len(memories), torch.bfloat16
        self.rank, self.ranks, self.width, self.hidden = rank, ranks, PROJECTED // ranks, HIDDEN // ranks
        self.side = LamportAllGather(memories[rank], SIZES[-1], self.width, bf16, blocks, POLLS)
        self.main = LamportAllGather(hidden_memories[rank], SIZES[-1], self.hidden, bf16, MAIN_BLOCKS, POLLS)
        self.part = torch.empty(SIZES[-1], self.width, dtype=bf16, device=CUDA).normal_()
        self.state = torch.empty(SIZES[-1], self.hidden, dtype=bf16, device=CUDA).normal_()
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
        self.round(SIZES[0])
        torch.cuda.synchronize()
        for gather in (self.side, self.main):
            gather.polls = POLLS

    def capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for rows in SIZES:
                self.round(rows)

    def stalled(self) -> bool:
        return bool(self.side.stalled) or bool(self.main.stalled)


def play(ranks: int, rounds: int, capped: bool) -> dict:
    resources = DeviceResources.of(CUDA)
    main = [Spinner(f"rank {rank}'s main stream", MAIN_BLOCKS, FOOTPRINT) for rank in range(ranks)]
    guests = [resources.whole()]  # a product of the main stream may need a multiprocessor for itself
    blocks = blocks_beside(CUDA, main, guests, ranks) if capped else 1 << 20
    needed = -(-SIZES[-1] * PROJECTED // ranks // 2 // 512)
    spinners = main + [Spinner("side", min(blocks, needed), FOOTPRINT)] * ranks
    memories = virtual_ranks(LamportAllGather.nbytes(ranks, SIZES[-1], PROJECTED // ranks, torch.bfloat16), ranks, CUDA)
    hidden = virtual_ranks(LamportAllGather.nbytes(ranks, SIZES[-1], HIDDEN // ranks, torch.bfloat16), ranks, CUDA)
    players = [Rank(rank, memories, hidden, blocks) for rank in range(ranks)]
    for player in players:
        player.warm()
    for player in players:
        for gather in (player.side, player.main):
            gather.release()
    for player in players:
        for gather in (player.side, player.main):
            gather.take_back()
        player.capture()
    torch.cuda.synchronize()
    mismatches, replays, began = 0, 0, time.perf_counter()
    looks = max(1, rounds // len(SIZES) // 10)
    while replays * len(SIZES) < rounds:
        for player, stream in zip(players, streams(ranks, CUDA), strict=True):
            with torch.cuda.stream(stream):
                player.graph.replay()
        replays += 1
        if replays % looks == 0 or replays * len(SIZES) >= rounds:
            torch.cuda.synchronize()
            if any(player.stalled() for player in players):
                break
            want = torch.cat([player.part for player in players], 1)
            mixed = torch.cat([player.state for player in players], 1)
            mismatches += sum(not same_bits(player.out, want) for player in players)
            mismatches += sum(not same_bits(player.mixed, mixed) for player in players)
    torch.cuda.synchronize()
    taken = time.perf_counter() - began
    return {
        "ranks": ranks,
        "capped": capped,
        "blocks a rank": min(blocks, needed),
        "fits": fits(resources, spinners, guests if capped else ()),
        "stalled": any(player.stalled() for player in players),
        "rounds": int(players[0].side.state[ROUND]),
        "mismatches": mismatches,
        "seconds": round(taken, 3),
        "us a round": round(taken / (replays * len(SIZES)) * 1e6, 1),
    }


if __name__ == "__main__":
    print(json.dumps(play(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "capped")), flush=True)

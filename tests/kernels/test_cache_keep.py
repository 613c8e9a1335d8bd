"""cache_keep against one row at a time, over many lookups."""

import pytest
import torch

from deltagram.kernels._layouts import FINISHED, HELD, TURN, new_slots, new_state
from deltagram.kernels.cache_keep import cache_keep
from deltagram.kernels.cache_probe import cache_probe
from deltagram.kernels.row_lookup import row_lookup

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


class OneByOne:
    """What a set of slots holds after each lookup, from the rules."""

    def __init__(self, num_slots: int) -> None:
        self.held: list[int] = [-1] * num_slots
        self.protected = [False] * num_slots

    def lookup(self, ids: list[int]) -> int:
        count = len(self.held)
        hit = {row % count for row in ids if row >= 0 and self.held[row % count] == row}
        challenger = {row % count: row for row in ids if row >= 0 and self.held[row % count] != row}
        hits = sum(row >= 0 and self.held[row % count] == row for row in ids)
        for slot in hit:
            self.protected[slot] = True
        for slot, row in challenger.items():
            if not self.protected[slot]:
                self.held[slot] = row
            self.protected[slot] = slot in hit
        return hits


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(("row_bytes", "num_slots"), [(264, 50), (41, 7), (40, 1)])
def test_rows_and_what_is_kept(device, row_bytes, num_slots):
    table = torch.randint(256, (200, row_bytes), dtype=torch.uint8).to(device)
    rows = torch.full((num_slots, row_bytes), 3, dtype=torch.uint8, device=device)
    slots, state = new_slots(num_slots, device), new_state(device)
    model, seen = OneByOne(num_slots), 1
    for step in range(60):
        ids = torch.randint(-1, 200 if step % 3 else 20, (1 + step * 3 % 90,), device=device)
        missing = cache_probe(ids, slots, state)
        packed = row_lookup(table, missing)
        cache_keep(ids, missing, packed, rows, slots, state)
        seen += len(ids)
        assert torch.equal(packed, row_lookup(table, ids)), step
        hits = model.lookup(ids.tolist())
        assert int(((missing < 0) & (ids >= 0)).sum()) == hits
        held = slots[:, HELD]
        assert held.tolist() == model.held, step
        assert torch.equal(rows[held >= 0], table[held[held >= 0]])
        assert int(state[TURN]) == seen and int(state[FINISHED]) == 0

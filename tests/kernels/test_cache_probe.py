"""cache_probe against sets and dictionaries."""

import pytest
import torch

from deltagram.kernels._layouts import CLAIM, HELD, HITS, LOOKUPS, TURN, USED, new_slots, new_state
from deltagram.kernels.cache_probe import cache_probe

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 5, 700])
def test_hits_claims_and_counts(device, count):
    slots, state = new_slots(13, device), new_state(device)
    held = {slot: slot + 13 * (slot % 3) for slot in range(0, 13, 2)}
    for slot, row in held.items():
        slots[slot, HELD] = row
    state[TURN] = 100
    ids = torch.randint(-1, 60, (count,))
    missing = cache_probe(ids.to(device), slots, state)
    wanted = ids.tolist()
    hit = [row >= 0 and held.get(row % 13) == row for row in wanted]
    assert missing.tolist() == [-1 if was else row for row, was in zip(wanted, hit, strict=True)]
    assert int(state[HITS]) == sum(hit) and int(state[LOOKUPS]) == sum(row >= 0 for row in wanted)
    claims = [0] * 13
    for i, row in enumerate(wanted):
        if row >= 0 and not hit[i]:
            claims[row % 13] = 100 + i
    assert slots[:, CLAIM].tolist() == claims
    used = {row % 13 for row, was in zip(wanted, hit, strict=True) if was}
    assert slots[:, USED].tolist() == [100 * (slot in used) for slot in range(13)]
    assert slots[:, HELD].tolist() == [held.get(slot, -1) for slot in range(13)]


def test_an_empty_set_holds_nothing():
    """Row 0 is in slot 0 of a set that nothing was put into; so is an absent row nowhere."""
    slots, state = new_slots(4, torch.device("cpu")), new_state(torch.device("cpu"))
    assert cache_probe(torch.tensor([0, -1, 3, 4]), slots, state).tolist() == [0, -1, 3, 4]
    assert int(state[HITS]) == 0 and int(state[LOOKUPS]) == 3

"""The state pools: one slot a running request, in every layer that keeps state. Layouts are stated here and nowhere else.

recurrent  [slots, HV, V, K]   the state S of the gated delta rule, fp32 unless the settings name another dtype
conv       [slots, R, C]       ring of the convolution's inputs: absolute position p at p modulo R
memory     [slots, R', C']     the same for a memory layer's convolution

The last slot is the pad slot: padding names it, no request owns it, nobody writes it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Owner:
    """What the host knows of a slot in use: who has it, and how many of its request's tokens the state holds."""

    request: int
    state_pos: int = 0


class SlotPool:
    """Hands out slots, and refuses a state that is not the one a request left.

    `generation[slot]` counts the owners a slot has had. A slot is taken with state_pos 0, where kernels read no state, so a
    recycled slot needs no clearing.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.generation = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._owners: dict[int, Owner] = {}

    @property
    def pad(self) -> int:
        """The slot that padding names, past those that can be owned."""
        return self.num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: int) -> int:
        """A free slot for `request`."""
        assert self._free, "no slot is free"
        slot = self._free.pop()
        self.generation[slot] += 1
        self._owners[slot] = Owner(request)
        return slot

    def give_back(self, slot: int, request: int) -> None:
        """End `request`'s ownership."""
        assert self._owners[slot].request == request, f"slot {slot} belongs to another request than {request}"
        del self._owners[slot]
        self._free.append(slot)

    def advance(self, slot: int, generation: int, request: int, start: int, num_new: int) -> None:
        """Check that the slot holds `request`'s first `start` tokens, and note that a step brings it `num_new` further."""
        owner = self._owners.get(slot)
        if owner is None or owner.request != request or self.generation[slot] != generation:
            raise RuntimeError(f"slot {slot}, generation {generation}, is not request {request}'s: it has {owner}")
        if owner.state_pos != start:
            raise RuntimeError(f"slot {slot} holds {owner.state_pos} tokens of request {request}; the step starts at {start}")
        owner.state_pos = start + num_new

    def check_empty(self) -> None:
        """No slot is owned, and each can be taken once."""
        assert not self._owners and sorted(self._free) == list(range(self.num_slots)), "slots leaked"


def ring_length(reach: int, max_draft: int) -> int:
    """Entries a ring needs so that a step's drafts never overwrite what its committed tokens still read."""
    return reach + 1 + max_draft


def allocate(num_slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, poison: bool) -> Tensor:
    """A pool of `num_slots` slots and the pad slot. `poison` fills it with NaN: no result may depend on what it held."""
    fill = float("nan") if poison else 0.0
    return torch.full((num_slots + 1, *shape), fill, dtype=dtype, device=device)

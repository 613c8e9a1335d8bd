"""The state pools: one slot a running request, in every layer that keeps state. Layouts are stated only here.

recurrent  [slots, HV, V, K]   the state S of the gated delta rule, fp32 unless the settings name another dtype
conv       [slots, R, C]       ring of the convolution's inputs: absolute position p at p modulo R
memory     [slots, R', C']     the same for a memory layer's convolution
recent     k [slots, D, H, K], v [slots, D, HV, V], gates [slots, D, 2, HV]: what the recurrent state needs of tokens
                               that it has yet to take, at their absolute position modulo D; only where there are some

A decode step reads a state whole to add one token to it; where it stores it as well, that is half of what it moves. So
on a GPU a state is stored after every few tokens, and those in between are kept as the k, v and gates they came from,
a hundredth of its bytes each, and taken again by each step until then: docs/gated-delta.md.

The last slot is the pad slot: padding names it, no request owns it, nobody writes it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

STORED_EVERY = 4  # on a GPU; a CPU takes a token a head at a time, where another pass costs what it saves


def stored_every(device: torch.device) -> int:
    """Tokens after which a recurrent state is stored."""
    return STORED_EVERY if device.type == "cuda" else 1


@dataclass(slots=True)
class Owner:
    """What the host knows of a slot in use.

    `state_pos` of the `request`'s tokens are in the recurrent state and its rings; up to `pending` more, drafted ones,
    may have been accepted and then wait in the rings too.
    """

    request: int
    state_pos: int = 0
    pending: int = 0


class SlotPool:
    """Hands out slots, and refuses a state that is not the one a request left.

    `generation[slot]` counts the owners a slot has had. A slot is taken with state_pos 0, where kernels read no state,
    so a recycled slot needs no clearing.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.generation = [0] * num_slots
        self.clear()

    def clear(self) -> None:
        """End all ownership, as after a step that failed half-way; generations go on."""
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._owners: dict[int, Owner] = {}

    @property
    def pad(self) -> int:
        """The slot that padding names, past those that can be owned."""
        return self.num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: int, state_pos: int = 0) -> int:
        """A free slot for `request`, of whose tokens the first `state_pos` will be restored before its first step."""
        assert self._free, "no slot is free"
        slot = self._free.pop()
        self.generation[slot] += 1
        self._owners[slot] = Owner(request, state_pos)
        return slot

    def give_back(self, slot: int, request: int) -> None:
        """End `request`'s ownership."""
        assert self._owners[slot].request == request, f"slot {slot} belongs to another request than {request}"
        del self._owners[slot]
        self._free.append(slot)

    def advance(
        self,
        slot: int,
        generation: int,
        request: int,
        start: int,
        num_new: int,
        num_draft: int = 0,
        uncertain: int = 0,
    ) -> None:
        """Check that the slot holds `request`'s first `start` tokens, or up to `uncertain` less where nobody on the
        host knows, and note that a step brings it `num_new` further, the last `num_draft` of which may yet be rejected.
        Raises RuntimeError if it does not."""
        owner = self._owners.get(slot)
        if owner is None or owner.request != request or self.generation[slot] != generation:
            raise RuntimeError(f"slot {slot}, generation {generation}, is not request {request}'s: it has {owner}")
        if not owner.state_pos <= start <= owner.state_pos + owner.pending or start - uncertain < owner.state_pos:
            raise RuntimeError(f"slot {slot} holds {owner}; the step starts at {start}, or up to {uncertain} before")
        owner.state_pos, owner.pending = start - uncertain + num_new - num_draft, uncertain + num_draft

    def check_empty(self) -> None:
        """No slot is owned, and each can be taken once."""
        assert not self._owners and sorted(self._free) == list(range(self.num_slots)), "slots leaked"


def ring_length(reach: int, max_draft: int) -> int:
    """Entries a ring needs so that a step's drafts never overwrite what its committed tokens still read."""
    return reach + 1 + max_draft


def recent_rings(
    num_slots: int,
    every: int,
    max_draft: int,
    heads: int,
    value_heads: int,
    value_dim: int,
    key_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    poison: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rings of k, v and gates, where steps have up to `max_draft` drafts a sequence and the state is stored after
    every `every` tokens.

    Their length keeps the entries that a step replays apart from those it writes: before it `every` - 1 + `max_draft`
    tokens may be pending, and it brings up to 1 + `max_draft`.
    """
    length = every + 2 * max_draft
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        allocate(num_slots, (length, heads, key_dim), dtype, device, poison),
        allocate(num_slots, (length, value_heads, value_dim), dtype, device, poison),
        allocate(num_slots, (length, 2, value_heads), exact, device, poison),
    )


def allocate(num_slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, poison: bool) -> Tensor:
    """A pool of `num_slots` slots and the pad slot, full of NaN if `poison`: no result may depend on what it held."""
    fill = float("nan") if poison else 0.0
    return torch.full((num_slots + 1, *shape), fill, dtype=dtype, device=device)

"""The token history: the one authoritative record of every running request's tokens, on the device.

Written by admission (the prompt), by a drafter (drafts, before they are hashed) and by the step that samples; hashing
and embedding read it and nothing else. It never holds a placeholder.
"""

import torch
from torch import Tensor

from deltagram.kernels._gates import FEW_STATES


class TokenHistory:
    """Tokens and lengths of up to `max_requests` requests.

    tokens: int32 [max_requests, max_context]; lengths: int32 [max_requests], the tokens known so far;
    untaken: int32 [max_requests], how many of them, but for the last, the recurrent state has yet to take: it is stored
    after every `every` tokens (kernels/derive_table.py), or at once in a step of up to `few` sequences.
    """

    def __init__(
        self, max_requests: int, max_context: int, device: torch.device, every: int = 1, few: int = FEW_STATES
    ) -> None:
        self.every, self.few = every, few
        self.tokens = torch.zeros(max_requests, max_context, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.untaken = torch.zeros(max_requests, dtype=torch.int32, device=device)
        # What is copied from must lie still until the copy has been made: a row's, until its owner has gone.
        self._staged: Tensor | None = None
        if device.type == "cuda":
            self._staged = torch.zeros(max_requests, 1 + max_context, dtype=torch.int32, pin_memory=True)

    def admit(self, row: int, tokens: list[int]) -> None:
        """Start `row` over with `tokens` (a prompt, or a preempted request's whole text). The host does not wait."""
        count = len(tokens)
        assert 0 < count <= self.tokens.shape[1] and min(tokens) >= 0
        known = torch.tensor([count, *tokens], dtype=torch.int32)
        if self._staged is not None:
            self._staged[row, : 1 + count] = known
            known = self._staged[row, : 1 + count]
        self.tokens[row, :count].copy_(known[1:], non_blocking=True)
        self.lengths[row].copy_(known[0], non_blocking=True)
        self.untaken[row].zero_()

"""The token history: the one authoritative record of every running request's tokens, on the device.

Written by admission (the prompt), by a drafter (drafts, before they are hashed) and by the sampler; hashing and
embedding read it and nothing else. It never holds a placeholder.
"""

import torch
from torch import Tensor


class TokenHistory:
    """Tokens and lengths of up to `max_requests` requests.

    tokens: int32 [max_requests, max_context]; lengths: int32 [max_requests], the tokens known so far;
    committed: int32 [max_requests], how many the last step added (1 to 1 + drafts, the sampled one included).
    """

    def __init__(self, max_requests: int, max_context: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_requests, max_context, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.committed = torch.zeros(max_requests, dtype=torch.int32, device=device)

    def admit(self, row: int, tokens: list[int]) -> None:
        """Start `row` over with `tokens` (a prompt, or a preempted request's whole text)."""
        assert 0 < len(tokens) <= self.tokens.shape[1] and min(tokens) >= 0
        self.tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32, device=self.tokens.device)
        self.lengths[row] = len(tokens)
        self.committed[row] = 0

    def append(self, rows: Tensor, tokens: Tensor) -> None:
        """Add one sampled token to each of `rows`. rows, tokens: int64 [n], rows distinct."""
        ends = self.lengths.index_select(0, rows)
        self.tokens.view(-1).index_copy_(0, rows * self.tokens.shape[1] + ends, tokens.int())
        self.lengths.index_copy_(0, rows, ends + 1)
        self.committed.index_fill_(0, rows, 1)

"""The paged cache: keys, values and index keys of every request, in fixed pages of a fixed pool."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_TOKENS = 64


def page_size(block_size: int) -> int:
    """Tokens a page: 64, or more where an indexer's blocks of `block_size` tokens would not fill pages evenly."""
    return math.lcm(PAGE_TOKENS, block_size)


@dataclass(slots=True)
class LayerCache:
    """One attention layer's part of the pages.

    keys, values: [pages, page size, Hkv, D]; index_keys: raw keys of the indexer, [pages, page size, Di], and
    block_keys: those of complete blocks, pooled, [pages, blocks a page, Di]; None for a layer that attends to
    everything.
    """

    keys: Tensor
    values: Tensor
    index_keys: Tensor | None = None
    block_keys: Tensor | None = None


class PagePool:
    """Hands out pages, and takes them back. Page ids are the pool's own; a page has one owner."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owner: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: int) -> int:
        """A free page for `request`."""
        assert self._free, "no page is free"
        page = self._free.pop()
        self._owner[page] = request
        return page

    def give_back(self, pages: list[int], request: int) -> None:
        """End `request`'s ownership of `pages`."""
        for page in pages:
            assert self._owner.pop(page, None) == request, f"page {page} does not belong to request {request}"
        self._free.extend(pages)

    def check_empty(self) -> None:
        """No page is owned, and each can be taken once."""
        assert not self._owner and sorted(self._free) == list(range(self.num_pages)), "pages leaked"


def poison(pool: Tensor, pages: list[int]) -> None:
    """Fill freed pages with NaN: no result may depend on what they held."""
    pool[torch.tensor(pages, dtype=torch.int64, device=pool.device)] = float("nan")

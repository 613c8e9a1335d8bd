"""The paged cache: keys, values and index keys of every request, in fixed pages of a fixed pool."""

import math
from collections.abc import Sequence
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
    """Hands out pages, and takes them back. Page ids are the pool's own. A page is free once nobody holds it: a
    request, by its id, or a cache of complete pages, by a negative number. Whoever shares a page only reads it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.clear()

    def clear(self) -> None:
        """Nobody holds a page any more."""
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._holders: dict[int, set[int]] = {}
        self.num_idle = 0  # pages that caches alone hold

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: int) -> int:
        """A free page for `request`."""
        assert self._free, "no page is free"
        page = self._free.pop()
        self._holders[page] = {request}
        return page

    def share(self, pages: Sequence[int], holder: int) -> None:
        """Let `holder` too hold `pages`, which somebody holds."""
        for page in pages:
            holders = self._holders[page]
            assert holder not in holders, f"{holder} holds page {page} already"
            self.num_idle -= _is_idle(holders)
            holders.add(holder)
            self.num_idle += _is_idle(holders)

    def is_idle(self, page: int) -> bool:
        """Whether caches alone hold a page that is held."""
        return _is_idle(self._holders[page])

    def give_back(self, pages: Sequence[int], holder: int) -> list[int]:
        """`holder` holds `pages` no longer; those of them that are free now."""
        freed = []
        for page in pages:
            holders = self._holders.get(page, set())
            assert holder in holders, f"page {page} does not belong to {holder}"
            self.num_idle -= _is_idle(holders)
            holders.remove(holder)
            if holders:
                self.num_idle += _is_idle(holders)
            else:
                del self._holders[page]
                freed.append(page)
        self._free.extend(freed)
        return freed

    def check_empty(self) -> None:
        """No page is held, and each can be taken once."""
        assert not self._holders and self.num_idle == 0 and sorted(self._free) == list(range(self.num_pages)), (
            "pages leaked"
        )


def _is_idle(holders: set[int]) -> bool:
    return max(holders) < 0


def poison(pool: Tensor, pages: list[int]) -> None:
    """Fill freed pages with NaN: no result may depend on what they held."""
    pool[torch.tensor(pages, dtype=torch.int64, device=pool.device)] = float("nan")

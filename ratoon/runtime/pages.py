# Owns: which pages of the cache are free, held, and held by several.
# Promises: page 0 is never handed out; a page is free again when its last holder returns it; no page is lost.
# Never: touches a tensor, or imports torch.
"""The page pool."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush


class PagePool:
    """Pages 1 .. num_pages - 1. Several rows may hold one page (a shared prefix)."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a cache needs at least 2 pages (page 0 is the dummy's), got {num_pages}")
        self.num_pages = num_pages
        # A heap: the lowest go first, so that a lone row's pages are neighbours.
        self._free = list(range(1, num_pages))
        self._holders: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_holders(self, page: int) -> int:
        """How many hold the page; 0 for a free one."""
        return self._holders.get(page, 0)

    def take(self, count: int) -> list[int]:
        """`count` pages held once each. Raises MemoryError naming both numbers when too few are free."""
        if count > len(self._free):
            raise MemoryError(f"{count} pages needed, {len(self._free)} of {self.num_pages - 1} free")
        pages = [heappop(self._free) for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for pages that are held."""
        for page in pages:
            if page not in self._holders:
                raise ValueError(f"page {page} is not held, so it cannot be shared")
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder fewer; ValueError for a page that nobody holds."""
        for page in pages:
            if page not in self._holders:
                raise ValueError(f"page {page} is returned, but nobody holds it")
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                heappush(self._free, page)

    def check(self) -> None:
        """Asserts that every page is either free once or held."""
        free = set(self._free)
        assert len(free) == len(self._free) and not free & self._holders.keys(), (
            "a page is free twice, or free and held"
        )
        assert len(free) + len(self._holders) == self.num_pages - 1, "a page is lost"

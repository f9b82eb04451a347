# Owns: which pages of the pool hold known beginnings of texts, and which of those may be given up for new pages.
# Promises: a page is found only by all tokens up to its end; one that a row holds is never given up.
# Never: touches a tensor, or imports torch. A page carries the target's and the drafter's K/V, so a hit serves both.
"""The prefix cache: a hash chain over full pages, least recently used first out."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from ratoon.runtime.pages import PagePool


class PrefixCache:
    """Takes and returns a pool's pages, keeping what they hold for as long as nobody else needs them.

    The cache is itself one holder of each page it knows. `enabled` False: pages are only taken and returned.
    """

    def __init__(self, pool: PagePool, page_size: int, enabled: bool = True) -> None:
        self._pool, self._page_size, self._enabled = pool, page_size, enabled
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """All pages but page 0."""
        return self._pool.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return self._pool.num_free + len(self._idle)

    def keys(self, ids: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
        """One key per full page of `ids`: a digest of all tokens up to its end. known: keys of a beginning."""
        if not self._enabled:
            return []
        keys = list(known[: len(ids) // self._page_size])
        for end in range((len(keys) + 1) * self._page_size, len(ids) + 1, self._page_size):
            tokens = array("q", ids[end - self._page_size : end]).tobytes()
            keys.append(blake2b((keys[-1] if keys else b"") + tokens, digest_size=16).digest())
        return keys

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest known beginning, held once more for the caller."""
        pages = []
        for key in keys:
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        self._pool.share(pages)
        for page in pages:
            self._idle.pop(page, None)
        return pages

    def take(self, count: int) -> list[int]:
        """`count` pages held once each; idle ones are given up, oldest first, where too few are free. MemoryError as
        the pool's."""
        while self._pool.num_free < count and self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self._pool.give_back([page])
        return self._pool.take(count)

    def keep(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Remembers a row's pages whose K/V are written, or queued before all that may read them."""
        for key, page in zip(keys, pages, strict=False):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key], self._key_of[page] = page, key
                self._pool.share([page])

    def give_back(self, pages: Sequence[int]) -> None:
        """A row holds these no more. The end of a text is given up before its beginning."""
        self._pool.give_back(pages)
        for page in reversed(pages):
            if page in self._key_of and self._pool.num_holders(page) == 1:
                self._idle[page] = None

    def forget(self) -> None:
        """Gives up everything that is remembered: nothing damaged may be found again."""
        self._pool.give_back(list(self._key_of))
        self._page_of.clear()
        self._key_of.clear()
        self._idle.clear()

    def check(self) -> None:
        """Asserts that what is remembered is held, and that idle pages are exactly those that nobody else holds."""
        self._pool.check()
        assert {key: page for page, key in self._key_of.items()} == self._page_of, "a page has two keys, or none"
        alone = {page for page in self._key_of if self._pool.num_holders(page) == 1}
        assert set(self._idle) == alone, "a page that a row holds may be given up, or one that none holds may not"

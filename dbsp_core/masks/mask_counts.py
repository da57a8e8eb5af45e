"""The counts of a mask's dense blocks that planners look at, made on the device where the bits are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dbsp_kernels.exchange import to_device

__all__ = ["MaskCounts"]

SUM = torch.float32  # exact: sums stay below 2**24
AT_ONCE = 2**20  # bits to turn into numbers together: as such they take several times their bytes
AT_ONCE_ON_GPU = 2**26  # where few launches matter more: 128 MiB


class MaskCounts:
    """Counts of a mask's bits, a few heads at a time.

    Each is made once, or by each of several threads that ask at the same time; every thread gets its own.

    Args:
        parts: bool[H, nq, nk] each, one for each sequence.
    """

    def __init__(self, *parts: torch.Tensor) -> None:
        self._parts = parts
        self._sums: tuple[np.ndarray, np.ndarray] | None = None
        self._by_rank: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def rows(self) -> np.ndarray:
        """int64[H, nq]: dense blocks per (head, query block), the work of each row."""
        return self._summed()[0]

    @property
    def columns(self) -> np.ndarray:
        """int64[H, nk]: rows that need each (head, KV block)."""
        return self._summed()[1]

    def _summed(self) -> tuple[np.ndarray, np.ndarray]:
        if self._sums is None:
            rows, columns = zip(*map(_sums, self._parts), strict=True)
            self._sums = _integers(torch.cat(rows, dim=1)), _integers(torch.cat(columns, dim=1))
        return self._sums

    def columns_by_rank(self, q_owner: np.ndarray, world: int) -> np.ndarray:
        """int32[world, H, nk]: rows of each rank that need each (head, KV block), from int64[H, nq], the rows' ranks.

        The latest is remembered. Some 20 ms for 40 heads of 1182 × 1182 blocks whose ranks own runs of rows, on one
        core.
        """
        known = self._by_rank  # read once: another thread may set it
        if known is not None and len(known[1]) == world and np.array_equal(known[0], q_owner):
            return known[1]
        if self._parts[0].is_cuda:
            owner = to_device(q_owner, self._parts[0].device)
            by_rank = self.columns_by_rank_on_device(owner, world).cpu().numpy()
        else:
            found, row = [], 0
            for part in self._parts:
                found.append(_columns_by_rank(part.numpy(), q_owner[:, row : row + part.shape[1]], world))
                row += part.shape[1]
            by_rank = found[0] if len(found) == 1 else np.concatenate(found, axis=2)
        self._by_rank = q_owner.copy(), by_rank
        return by_rank

    def columns_by_rank_on_device(self, q_owner: torch.Tensor, world: int) -> torch.Tensor:
        """The same, made where the bits and q_owner are, without a host synchronisation."""
        ranks, row, found = torch.arange(world, device=q_owner.device)[:, None], 0, []
        for part in self._parts:
            owner, head, of_heads = q_owner[:, row : row + part.shape[1]], 0, []
            row += part.shape[1]
            for wide in _widened(part, AT_ONCE_ON_GPU if part.is_cuda else AT_ONCE):
                of_rank = (owner[head : head + len(wide), None] == ranks).to(wide.dtype)
                of_heads.append((of_rank @ wide).int())
                head += len(wide)
            found.append(torch.cat(of_heads))
        return torch.cat(found, dim=2).transpose(0, 1)


def _sums(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, nq], [H, nk]: the sums of a part's rows and columns, where its bits are."""
    if part.is_cuda:  # adds up single bytes as fast as it reads them
        rows, columns = (torch.cat([head.sum(dim=axis, dtype=SUM) for head in part.split(1)]) for axis in (2, 1))
        return rows, columns
    narrow = np.uint16 if max(part.shape[1:]) < 2**16 else np.int64  # the narrower, the faster
    values = part.view(torch.uint8).numpy()
    rows, columns = (
        torch.from_numpy(np.add.reduce(values, axis=axis, dtype=narrow).astype(np.int64)) for axis in (2, 1)
    )
    return rows, columns


def _columns_by_rank(bits: np.ndarray, q_owner: np.ndarray, world: int) -> np.ndarray:
    """int32[world, H, nk] of one part, from bits bool[H, nq, nk] and q_owner int64[H, nq]."""
    found = np.zeros((world, len(bits), bits.shape[2]), dtype=np.int32)
    for head, (rows, owner) in enumerate(zip(bits.view(np.uint8), q_owner, strict=True)):
        if (np.diff(owner) < 0).any():  # rows by their rank
            order = np.argsort(owner.astype(np.uint16), kind="stable")
            rows, owner = rows[order], owner[order]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        for start, stop in zip(first, np.append(first[1:], len(owner)), strict=True):
            for begin in range(start, stop, 255):  # as many bytes as a byte can count: the narrower, the faster
                some = rows[begin : min(stop, begin + 255)]
                found[owner[start], head] += np.add.reduce(some, axis=0, dtype=np.uint8)
    return found


def _widened(part: torch.Tensor, at_once: int = AT_ONCE) -> Iterator[torch.Tensor]:
    """[h, nq, nk] ones and zeros to add up, a few heads h at a time: in 16 bits, products are exact below 2**11."""
    small = part.is_cuda and max(part.shape[1:]) <= 2**11
    for some in part.split(max(1, at_once // max(1, part[0].numel()))):
        # As bytes a CPU widens them four times as fast.
        yield some.view(torch.uint8).to(torch.float16 if small else torch.float32)


def _integers(sums: torch.Tensor) -> np.ndarray:
    """The same as int64 on the host."""
    return sums.long().contiguous().cpu().numpy()

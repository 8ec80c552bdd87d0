"""FBGEMM's training kernel for hash-ZCH, rewritten for one thread on the host.

FBGEMM has it for GPUs only. TorchRec's unsharded module runs on it as an oracle.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torchrec.modules import hash_mc_evictions
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

from torchrec_2dsp._compat import hashed_id_map

_MASK = 2**64 - 1


def hash_of(id_: int) -> int:
    """Hash an id as FBGEMM does, by MurmurHash3."""

    def rotated(number: int, by: int) -> int:
        return (number << by | number >> (64 - by)) & _MASK

    def mixed(number: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            number = (number ^ number >> 33) * factor & _MASK
        return number ^ number >> 33

    first = rotated(id_ * 0x87C37B91114253D5 & _MASK, 31) * 0x4CF5AD432745937F & _MASK
    first = (rotated(first, 27) * 5 + 0x52DCE729) & _MASK
    second = (first * 5 + 0x38495AB5) & _MASK
    first, second = first ^ 16, second ^ 16
    first = (first + second) & _MASK
    second = mixed((first + second) & _MASK)
    first = (mixed(first) + second) & _MASK
    return first ^ (first + second) & _MASK


@contextmanager
def at_hour(hour: int) -> Iterator[None]:
    """Set TorchRec's clock to an hour."""
    with patch.object(hash_mc_evictions, "time", SimpleNamespace(time=lambda: 3600.0 * hour)):
        yield


def set_clock(hour: Callable[[], int]) -> None:
    """Set this package's clock in this process."""
    hashed_id_map.time = SimpleNamespace(time=lambda: 3600.0 * hour())  # type: ignore[assignment]


class OneThreadHashZch(HashZchManagedCollisionModule):
    """TorchRec's module, which also trains on a CPU."""

    num_batches = 0
    """A counter for those who train it."""

    def _zero_collision_hash(self, *, readonly: bool, **given: Any) -> Any:  # type: ignore[override]
        if readonly:
            # FBGEMM's CPU kernel rejects arguments that TorchRec passes with an evicting policy.
            given |= {"input_metadata": None, "eviction_threshold": -1}
            return super()._zero_collision_hash(readonly=True, **given)
        rows, evicted = [], []
        for n in range(given["input"].numel()):
            row, is_evicted = _take(n, **given)
            rows.append(row)
            evicted += [row] if is_evicted else []
        return torch.tensor(rows, dtype=torch.int64), torch.tensor(evicted, dtype=torch.int64)


def _take(n: int, **given: Any) -> tuple[int, bool]:
    """Give an id a slot; return the slot, and whether another id had it."""
    ids, hours = given["identities"].data[:, 0], given["metadata"]
    id_, size, first = (int(given[name][n]) for name in ("input", "local_sizes", "offsets"))
    threshold, is_lru = given["eviction_threshold"], given["eviction_policy"] == 1
    reserved = max(given["num_reserved_slots"], 0)
    number, size = hash_of(id_), size - reserved
    window = [first + (number + step) % size for step in range(given["max_probe"])]

    def take(slot: int) -> int:
        ids[slot] = id_
        if hours is not None:
            hours[slot, 0] = max(int(hours[slot, 0]), int(given["input_metadata"][n]))
        return slot

    is_known = id_ in ids[window].tolist()
    oldest, oldest_hour = None, threshold
    for slot in window:
        if int(ids[slot]) in (id_, -1):
            return take(slot), False
        if hours is None or is_known or int(hours[slot, 0]) >= threshold:
            continue
        if not is_lru:
            return take(slot), True
        if int(hours[slot, 0]) < oldest_hour:
            oldest, oldest_hour = slot, int(hours[slot, 0])
    if oldest is not None:
        return take(oldest), True
    return (first + size + number % reserved if reserved else first + number % size), False

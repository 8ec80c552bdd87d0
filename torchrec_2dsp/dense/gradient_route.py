"""`GradientRoute`: the ways by which sums of thresholded gradients are made, and their bytes. Pure.

GATHER   each rank sends its entries to all others; all add up the same
OWNERS   each rank sends an entry to the element's owner, which adds up, and sends the largest
         sums to all; what it leaves out stays in its residual
"""

import enum
import math
from dataclasses import dataclass

from torchrec_2dsp.codecs.flat import FlatCodec
from torchrec_2dsp.codecs.sparse import SparseCodec

_FLOAT_BYTES = 4
_OWNERS_GAIN = 3.0
"""Owners have to send so many times less than a gather to be chosen: they apply fewer entries in a
step, and take two messages after one another."""
_SPARE = 1.25
"""The room of a message to an owner, in units of what it gets on average."""
_SPARE_ENTRIES = 8


class GradientRoute(enum.StrEnum):
    """How the sum over all ranks is made."""

    DENSE = "dense"
    """All elements are added up by an all-reduce."""

    GATHER = "gather"
    """Each rank gets the entries of all others."""

    OWNERS = "owners"
    """Each element has an owner that adds up its entries and sends the largest sums to all."""


@dataclass(frozen=True)
class BucketSize:
    """The size of a bucket of gradients, and how much of it may be sent."""

    num_elements: int
    """The elements of the bucket."""

    capacity: int
    """The most entries that a rank chooses of it."""

    num_ranks: int
    """How many ranks add up their gradients."""

    values: FlatCodec
    """How the values of entries look."""

    @property
    def gather_codec(self) -> SparseCodec:
        """The form of a rank's entries for all others."""
        return SparseCodec(self.num_elements, self.capacity, self.values)

    @property
    def owner_codec(self) -> SparseCodec:
        """The form of a rank's entries for one owner, and of the sums that an owner sends."""
        of_owner = math.ceil(self.capacity / self.num_ranks * _SPARE) + _SPARE_ENTRIES
        return SparseCodec(
            math.ceil(self.num_elements / self.num_ranks),
            min(of_owner, self.capacity),
            self.values,
        )

    def sent_bytes(self, route: GradientRoute) -> float:
        """The bytes that a rank sends to others; an all-reduce is taken to be a ring.

        Example:
            200x fewer entries are 100x fewer bytes on 4 ranks, and not even 10x on 64, unless
            owners add up.

            >>> import torch
            >>> from torchrec_2dsp.codecs.flat import FlatCodec
            >>> from torchrec_2dsp.codecs.rows import FloatRows
            >>> from torchrec_2dsp.dense.gradient_route import BucketSize, GradientRoute
            >>> for num_ranks in (4, 64):
            ...     values = FlatCodec(FloatRows(torch.bfloat16), block=2)
            ...     bucket = BucketSize(4_000_000, 20_000, num_ranks, values)
            ...     all_bytes = bucket.sent_bytes(GradientRoute.DENSE)
            ...     for route in (GradientRoute.GATHER, GradientRoute.OWNERS):
            ...         print(num_ranks, route.value, round(all_bytes / bucket.sent_bytes(route)))
            4 gather 100
            4 owners 159
            64 gather 6
            64 owners 156
        """
        others = self.num_ranks - 1
        if route is GradientRoute.GATHER:
            return float(others * self.gather_codec.num_bytes)
        if route is GradientRoute.OWNERS:
            return 2.0 * others * self.owner_codec.num_bytes
        return 2.0 * others / self.num_ranks * self.num_elements * _FLOAT_BYTES

    def cheapest_route(self) -> GradientRoute:
        """The route that sends least, as long as owners are worth it."""
        gathered = self.sent_bytes(GradientRoute.GATHER)
        owned = self.sent_bytes(GradientRoute.OWNERS)
        is_owned = self.num_elements >= self.num_ranks and owned * _OWNERS_GAIN <= gathered
        best = GradientRoute.OWNERS if is_owned else GradientRoute.GATHER
        sends_less = self.sent_bytes(best) < self.sent_bytes(GradientRoute.DENSE)
        return best if sends_less else GradientRoute.DENSE

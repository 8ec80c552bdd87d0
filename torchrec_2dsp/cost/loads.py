"""`Loads`: what each rank of a sharding group has to do in a step."""

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.float64]
"""A number for each rank of a sharding group, in the order of its ranks."""


@dataclass
class Loads:
    """Work and messages of a plan's tables, added up.

    Of messages it says how many bytes one rank has for each of the others: ``..._from`` for those
    that it sends to all, ``..._to`` for those that all send to it.
    """

    num_ranks: int

    lookup_ids: Ranks = field(init=False)
    """Rows read from tables."""
    lookup_bytes: Ranks = field(init=False)
    update_ids: Ranks = field(init=False)
    """Rows whose gradient is applied, counted for each lookup."""
    update_bytes: Ranks = field(init=False)
    sorted_ids: Ranks = field(init=False)
    """Ids among which the distinct ones are found."""
    gathered_bytes: Ranks = field(init=False)
    """Rows that are copied to where they are wanted."""
    added_bytes: Ranks = field(init=False)
    """Rows that are added up."""
    dense_bytes: Ranks = field(init=False)
    """Of tables that are updated as a whole."""

    ids_to: Ranks = field(init=False)
    """Ids and lengths of bags."""
    pooled_from: Ranks = field(init=False)
    """Looked-up vectors."""
    pooled_to: Ranks = field(init=False)
    """Their gradients."""
    rows_from: Ranks = field(init=False)
    """Distinct rows, or vectors of bags that aren't empty: what `Exchange` adds to TorchRec's."""
    rows_to: Ranks = field(init=False)
    """Their gradients."""
    scattered: Ranks = field(init=False)
    """What a rank brings to a reduce-scatter over the group."""
    gathered: Ranks = field(init=False)
    """What a rank brings to the all-gather of its backward."""
    host_scattered: Ranks = field(init=False)
    """The same inside hosts."""
    host_gathered: Ranks = field(init=False)
    host_rows_from: Ranks = field(init=False)
    """Distinct rows that a rank hands on to each rank of its host."""
    host_rows_to: Ranks = field(init=False)
    """Their gradients."""
    across_from: Ranks = field(init=False)
    """What a rank sends to each rank with its place on another host."""
    across_to: Ranks = field(init=False)

    all_reduced_bytes: float = 0.0
    """Dense gradients of data-parallel tables, over the world."""

    types: set[str] = field(default_factory=set)
    """What tables are exchanged separately."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if not one.init:
                setattr(self, one.name, np.zeros(self.num_ranks))

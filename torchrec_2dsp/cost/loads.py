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
    that it sends to all, ``..._to`` for those that all send to it. Of rows that are brought
    together it says how many bytes one rank has, a host's ranks have, and all have.
    """

    num_ranks: int

    lookup_ids: Ranks = field(init=False)
    """Rows read from tables for bags, and updated, counted for each id."""
    lookup_bytes: Ranks = field(init=False)
    lookup_row_bytes: Ranks = field(init=False)
    """The same rows, each counted once."""
    lookup_vector_bytes: Ranks = field(init=False)
    """What is made of them."""
    owned_ids: Ranks = field(init=False)
    """Rows that are looked up and updated for others, by row exchange."""
    owned_bytes: Ranks = field(init=False)
    found_ids: Ranks = field(init=False)
    """Ids among which the distinct ones are found."""
    moved_rows: Ranks = field(init=False)
    """Copied to where they are wanted."""
    moved_bytes: Ranks = field(init=False)
    added_rows: Ranks = field(init=False)
    """Rows that are added up."""
    added_bytes: Ranks = field(init=False)
    given_bytes: Ranks = field(init=False)
    """Vectors that the model gets."""
    dense_bytes: Ranks = field(init=False)
    """Of tables that are updated as a whole."""
    all_reduced_bytes: Ranks = field(init=False)
    """Their gradients, which are added up over the world."""

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
    early_from: Ranks = field(init=False)
    """Those of all rows that may travel while the step before computes."""
    lagging_to: Ranks = field(init=False)
    """Those of all gradients of rows that may travel while the next step does."""
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

    hot_ids: Ranks = field(init=False)
    """Lookups of hot rows."""
    hot_id_bytes: Ranks = field(init=False)
    hot_rows: Ranks = field(init=False)
    """That the world touches."""
    hot_bytes_of_rank: Ranks = field(init=False)
    """Gradients of the hot rows that a rank touches, with their numbers."""
    hot_bytes_of_host: Ranks = field(init=False)
    hot_bytes_of_all: Ranks = field(init=False)

    peer_rows: Ranks = field(init=False)
    """Rows that any replica peer touches, and all apply."""
    peer_row_bytes: Ranks = field(init=False)
    """Of their gradients, as they are applied."""
    peer_bytes_of_rank: Ranks = field(init=False)
    """Gradients of the rows that a peer touches, as they travel, with the rows' numbers."""
    peer_bytes_of_host: Ranks = field(init=False)
    peer_bytes_of_all: Ranks = field(init=False)

    averaged_rows: Ranks = field(init=False)
    """Rows that a rank has touched from one average of weights to the next."""
    averaged_bytes: Ranks = field(init=False)
    """Of them, with their numbers."""
    averaged_whole_bytes: Ranks = field(init=False)
    """Of the shards in which they are."""
    moment_rows: Ranks = field(init=False)
    """The same three of moments, where they are averaged at other steps than weights."""
    moment_bytes: Ranks = field(init=False)
    moment_whole_bytes: Ranks = field(init=False)

    types: set[str] = field(default_factory=set)
    """What tables are exchanged separately."""

    is_even: bool = False
    """Whether all ranks are known to have the same to do."""

    values: NDArray[np.float64] = field(init=False)
    """All of the above, a row for each."""

    def __post_init__(self) -> None:
        self.values = np.zeros((len(LOADS), self.num_ranks))

    def __getattr__(self, name: str) -> Ranks:
        # A search makes many of these, and most loads of a table are zero.
        if name not in _NUMBERS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        row: Ranks = self.values[_NUMBERS[name]]
        setattr(self, name, row)
        return row

    @classmethod
    def even(cls, num_ranks: int, of_rank: Ranks, types: set[str]) -> "Loads":
        """Every rank has the same: a number for each of `LOADS`."""
        made = cls(num_ranks, types=types, is_even=True)
        made.values += of_rank[:, None]
        return made

    def evened(self) -> "Loads":
        """The same work, dealt evenly."""
        if self.is_even:
            return self
        return self.even(self.num_ranks, self.values.mean(axis=1), self.types)


LOADS = tuple(one.name for one in fields(Loads) if not one.init and one.name != "values")
"""The names of all loads, in the order of `Loads.values`."""

_NUMBERS = {name: number for number, name in enumerate(LOADS)}

"""`Loads`: what each rank of a sharding group has to do in a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.coefficients import KernelCost

Ranks = NDArray[np.float64]
"""A number for each rank of a sharding group, in the order of its ranks."""


class Load:
    """One of the numbers that `Loads` has for each rank: a row of `Loads.values`, by its name."""

    def __set_name__(self, owner: type, name: str) -> None:
        names = [name for name, member in vars(owner).items() if isinstance(member, Load)]
        self._row = names.index(name)

    @overload
    def __get__(self, loads: None, owner: type) -> "Load": ...
    @overload
    def __get__(self, loads: "Loads", owner: type) -> Ranks: ...
    def __get__(self, loads: "Loads | None", owner: type) -> "Load | Ranks":
        return self if loads is None else loads.values[self._row]

    def __set__(self, loads: "Loads", value: Ranks) -> None:
        loads.values[self._row] = value


@dataclass(eq=False)
class Loads:
    """Work and messages of a plan's tables, added up.

    Of messages it says how many bytes one rank has for each of the others: ``..._from`` for those
    that it sends to all, ``..._to`` for those that all send to it. Of rows that are brought
    together it says how many bytes one rank has, a host's ranks have, and all have.
    """

    num_ranks: int
    """How many ranks the sharding group has."""

    lookup_ids = Load()
    """Rows read from tables for bags, and updated, counted for each id."""
    lookup_bytes = Load()
    """Bytes of these rows, counted for each id."""
    lookup_row_bytes = Load()
    """Bytes of these rows, each counted once."""
    lookup_vector_bytes = Load()
    """Bytes of the vectors that bags make of these rows."""
    owned_ids = Load()
    """Rows that are looked up and updated for others, by row exchange."""
    owned_bytes = Load()
    """Bytes of the rows that are looked up and updated for others."""
    found_ids = Load()
    """Ids among which the distinct ones are found."""
    moved_rows = Load()
    """Rows that are copied to where they are wanted."""
    moved_bytes = Load()
    """Bytes of the rows that are copied."""
    encoding_s = Load()
    """Seconds of encoding and decoding, forward and backward."""
    added_rows = Load()
    """Rows that are added up."""
    added_bytes = Load()
    """Bytes of the rows that are added up."""
    given_bytes = Load()
    """Bytes of the vectors that the model gets."""
    dense_bytes = Load()
    """Bytes of tables that are updated as a whole."""
    all_reduced_bytes = Load()
    """Bytes of the gradients of such tables, which are added up over the world."""
    ids_to = Load()
    """Ids and lengths of bags."""
    pooled_from = Load()
    """Looked-up vectors."""
    pooled_to = Load()
    """Gradients of looked-up vectors."""
    rows_from = Load()
    """Distinct rows, or vectors of bags that aren't empty: what `Exchange` adds to TorchRec's."""
    rows_to = Load()
    """Gradients of such rows and vectors."""
    early_from = Load()
    """The part of all rows that may travel while the step before computes."""
    lagging_to = Load()
    """The part of all gradients of rows that may travel while the next step computes."""
    scattered = Load()
    """What a rank brings to a reduce-scatter over the group."""
    gathered = Load()
    """What a rank brings to the all-gather over the group, in the backward."""
    host_scattered = Load()
    """What a rank brings to a reduce-scatter inside its host."""
    host_gathered = Load()
    """What a rank brings to the all-gather inside its host, in the backward."""
    host_rows_from = Load()
    """Distinct rows that a rank hands on to each rank of its host."""
    host_rows_to = Load()
    """Gradients of the rows that are handed on."""
    across_from = Load()
    """What a rank sends to each rank with its place on another host."""
    across_to = Load()
    """Gradients that a rank sends back to them."""
    hot_ids = Load()
    """Lookups of hot rows."""
    hot_id_bytes = Load()
    """Bytes of looked-up hot rows, counted for each id."""
    hot_rows = Load()
    """Hot rows that the world touches."""
    hot_bytes_of_rank = Load()
    """Gradients of the hot rows that a rank touches, with their numbers."""
    hot_bytes_of_host = Load()
    """Gradients of the hot rows that a host's ranks touch, with their numbers."""
    hot_bytes_of_all = Load()
    """Gradients of the hot rows that the world touches, with their numbers."""
    peer_rows = Load()
    """Rows that any replica peer touches, and all apply."""
    peer_row_bytes = Load()
    """Bytes of the gradients of such rows, as they are applied."""
    peer_bytes_of_rank = Load()
    """Gradients of the rows that a peer touches, as they travel, with the rows' numbers."""
    peer_bytes_of_host = Load()
    """Gradients of the rows that a host's peers touch, as they travel."""
    peer_bytes_of_all = Load()
    """Gradients of the rows that all peers touch, as they travel."""
    averaged_rows = Load()
    """Rows that a rank has touched from one average of weights to the next."""
    averaged_bytes = Load()
    """Bytes of these rows, with their numbers."""
    averaged_whole_bytes = Load()
    """Bytes of the whole shards in which these rows are."""
    moment_rows = Load()
    """Rows of which moments are averaged, where that is done at other steps than weights."""
    moment_bytes = Load()
    """Bytes of the moments of these rows, with their numbers."""
    moment_whole_bytes = Load()
    """Bytes of the moments of the whole shards in which these rows are."""

    types: set[str] = field(default_factory=set)
    """The types of messages, each of which is exchanged separately."""

    codecs: Mapping[Transport, KernelCost] = field(default_factory=dict)
    """The time of encoding and decoding rows; without any, it isn't counted."""

    is_even: bool = False
    """Whether all ranks are known to have the same to do."""

    def __post_init__(self) -> None:
        self.values: NDArray[np.float64] = np.zeros((len(LOADS), self.num_ranks))
        """All loads, with a row for each of `LOADS` and a column for each rank."""

    @classmethod
    def even(cls, num_ranks: int, of_rank: Ranks, types: set[str]) -> "Loads":
        """Loads of ranks that all have the same to do: a number for each of `LOADS`."""
        loads = cls(num_ranks, types=types, is_even=True)
        loads.values += of_rank[:, None]
        return loads

    def evened(self) -> "Loads":
        """Loads of ranks that share all this work evenly."""
        if self.is_even:
            return self
        return self.even(self.num_ranks, self.values.mean(axis=1), self.types)


LOADS = tuple(name for name, member in vars(Loads).items() if isinstance(member, Load))
"""The names of all loads, in the order of `Loads.values`."""

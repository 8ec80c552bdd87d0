"""A case's batches as plain tensors: for the oracle, and for TorchRec's jagged tensors."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from tests.fuzz.case import Case, ModuleCase


@dataclass(frozen=True)
class Lookups:
    """The ids that one feature has in one rank's batch."""

    ids: torch.Tensor
    lengths: torch.Tensor
    """The number of ids in each bag; each sample has a bag."""
    weights: torch.Tensor
    """The weight of each id, which only weighted modules use."""

    @cached_property
    def samples(self) -> torch.Tensor:
        """Each id's sample."""
        return torch.arange(self.lengths.numel()).repeat_interleave(self.lengths)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Each id's position in its bag."""
        starts = (self.lengths.cumsum(0) - self.lengths).repeat_interleave(self.lengths)
        return torch.arange(self.ids.numel()) - starts

    def of_bags(self, bags: torch.Tensor) -> "Lookups":
        """Return the samples that have these bags, by number."""
        starts = self.lengths.cumsum(0) - self.lengths
        places = [
            torch.arange(start, start + length)
            for start, length in zip(
                starts[bags].tolist(), self.lengths[bags].tolist(), strict=True
            )
        ]
        ids = torch.cat([self.ids.new_empty(0), *places])
        return Lookups(self.ids[ids], self.lengths[bags], self.weights[ids])


@dataclass(frozen=True)
class SharedBags:
    """The distinct bags that one feature has in one rank's batch."""

    lookups: Lookups
    """The ids of each bag."""
    of_samples: torch.Tensor
    """The number of each sample's bag."""


@dataclass(frozen=True)
class LocalBatch:
    """One rank's batch."""

    features: dict[tuple[int, int], Lookups]
    """The ids of each feature, by the numbers of its module and of the feature."""
    targets: torch.Tensor
    """The wanted scores."""
    shared: dict[tuple[int, int], SharedBags] = field(default_factory=dict)
    """The distinct bags of each feature; empty where each sample has bags of its own."""
    uses_shortcut: bool = True
    """True if the dense part's shortcut counts, if it has one."""
    left_out: int = 0
    """A number by which the loss leaves out outputs, see `ModuleCase.is_left_out`."""

    @property
    def sent(self) -> dict[tuple[int, int], Lookups]:
        """Return the ids that ranks get, including bags that no sample uses."""
        return self.features | {key: bags.lookups for key, bags in self.shared.items()}


def sizes_of(case: Case, number: int) -> tuple[int, ...]:
    """Return each rank's number of samples in a batch."""
    if not case.rotated:
        return case.sizes
    first = number % len(case.sizes)
    return case.sizes[first:] + case.sizes[:first]


def local_batch(case: Case, number: int, rank: int, *, is_refused: bool = False) -> LocalBatch:
    """Return a rank's share in a batch, with bad ids where the case has them or it is refused."""
    generator = torch.Generator().manual_seed((case.seed * 1_000 + number) * 16 + rank)
    size = sizes_of(case, number)[rank]
    features, shared = {}, {}
    # Some batches are ordinary ones, not on all ranks at once.
    is_variable = case.variable and (number + rank) % 5 > 0
    for place, module in enumerate(case.modules):
        for feature in module.features:
            rows = num_rows(module, feature)
            num_bags = size
            if is_variable and size:
                num_bags = int(torch.randint(1, size + 1, (), generator=generator))
            lengths = torch.randint(0, case.max_length + 1, (num_bags,), generator=generator)
            count = int(lengths.sum())
            frequencies = torch.arange(1, rows + 1).float().pow(-case.skew)
            ids = torch.multinomial(frequencies, max(1, count), True, generator=generator)[:count]
            if module.evicts:
                ids = (ids + module.drift * (number % 100)) * module.id_step
            weights = torch.rand(count, generator=generator) + 0.5
            if case.form == "expanded":
                weights = torch.full((1,), 0.5).expand(count)
            if not module.evicts and (has_bad_ids(case, number) or is_refused):
                ids = _with_bad_ids(ids, rows, generator)
            features[place, feature] = Lookups(ids, lengths, weights)
            if is_variable:
                bags = torch.randint(0, max(1, num_bags), (size,), generator=generator)
                shared[place, feature] = SharedBags(features[place, feature], bags)
                features[place, feature] = features[place, feature].of_bags(bags)
    targets = torch.rand(size, generator=generator) * 2 - 1
    # Some batches use it on all ranks, on some, or on none.
    uses_shortcut = number % 3 == 2 or (number % 3 == 1 and rank % 2 == 0)
    return LocalBatch(features, targets, shared, uses_shortcut, left_out=number + rank)


def num_rows(module: ModuleCase, feature: int) -> int:
    """Return a feature's number of valid ids: its smallest table's rows, or more with id maps."""
    rows = min(table.rows for table in module.tables if feature in table.features)
    return 2 * rows + 2 if module.evicts else rows


def has_bad_ids(case: Case, number: int) -> bool:
    """Tell whether a batch has bad ids that are dropped or clamped rather than refused."""
    return case.has_bad_ids and case.bad_ids != "raise" and number % 2 == 0


def is_refused(case: Case, number: int) -> bool:
    """Tell whether a batch to be refused has a bad id on any rank."""
    batches = [local_batch(case, number, rank, is_refused=True) for rank in range(case.world_size)]
    return any(
        bool(((lookups.ids < 0) | (lookups.ids >= num_rows(case.modules[place], feature))).any())
        for batch in batches
        for (place, feature), lookups in batch.sent.items()
    )


def corrected(case: Case, batch: LocalBatch) -> LocalBatch:
    """Return a batch with its bad ids dropped or clamped, by the case's ``bad_ids``.

    Where positions have weights, the ids' positions in the batch replace the weights.
    """

    def of(key: tuple[int, int], lookups: Lookups) -> Lookups:
        rows = num_rows(case.modules[key[0]], key[1])
        ids, lengths, weights = lookups.ids, lookups.lengths, lookups.weights
        if case.modules[key[0]].evicts:
            return lookups
        if case.modules[key[0]].kind == "positions":
            weights = lookups.positions
        if case.bad_ids == "drop":
            is_good = (ids >= 0) & (ids < rows)
            samples = lookups.samples[is_good]
            lengths = torch.bincount(samples, minlength=lengths.numel())
            ids, weights = ids[is_good], weights[is_good]
        else:
            ids = ids.clamp(0, rows - 1)
        return Lookups(ids, lengths, weights)

    features = {key: of(key, lookups) for key, lookups in batch.features.items()}
    shared = {
        key: SharedBags(of(key, bags.lookups), bags.of_samples)
        for key, bags in batch.shared.items()
    }
    return replace(batch, features=features, shared=shared)


def _with_bad_ids(ids: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    is_bad = torch.rand(ids.numel(), generator=generator) < 0.3
    bad = torch.tensor([-1, rows, rows + 7, 2**40])
    chosen = bad[torch.randint(0, bad.numel(), (ids.numel(),), generator=generator)]
    return torch.where(is_bad, chosen, ids)

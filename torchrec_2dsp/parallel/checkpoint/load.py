"""`load_checkpoint` and `load_weights`: check a folder, then read it into a model in place."""

import io
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from torchrec_2dsp._compat.dcp import open_address, set_element
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.address import Address, Place, place_of
from torchrec_2dsp.parallel.checkpoint.coordination import coordination_group, run_dcp
from torchrec_2dsp.parallel.checkpoint.parts import (
    DENSE,
    EXTRA,
    FUSED,
    IN_PLACE,
    MODEL,
    TRAIN_STATE,
    check_together,
    dense_params,
    live_state,
    run_load_hooks,
    stored_extra,
    wrapped_optimizers,
)
from torchrec_2dsp.parallel.checkpoint.save import check_belongs, checked_folder, wait_for_save
from torchrec_2dsp.parallel.checkpoint.stored import StoredCheckpoint
from torchrec_2dsp.parallel.model_parallel2d import calling_together
from torchrec_2dsp.shard.parted import groups_of, sharded_tables

if TYPE_CHECKING:
    from torchrec_2dsp.parallel.train_state.state import TrainState


logger = logging.getLogger(__name__)


def load_checkpoint(
    path: str | PathLike[str],
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer | None = None,
    *,
    train_state: "TrainState | None" = None,
) -> dict[str, Any]:
    """Read a checkpoint into a model, in place; call it on all ranks.

    Mesh, layout, sharding types, hot rows and number of ranks may differ from the save's; tables
    and fused optimizer may not. Everything is checked before the first tensor is written: if the
    call raises, model and optimizer are unchanged. Nothing in a checkpoint can run code.

    Args:
        path: the folder, or its address.
        model: a `ModelParallel2D`, or TorchRec's own `DistributedModelParallel`.
        optimizer: as in `save_checkpoint`; without it, its saved state is ignored.
        train_state: the train state to load, in place; without it, the saved one is ignored.

    Returns:
        The saved ``extra``.

    Collectives:
        Agreements on each rank's checks; a sync's, if a backward is pending; then
        a gather of names and shapes, and DCP's.
    """
    with calling_together(groups_of(model), "load_checkpoint()"):
        group = coordination_group()
        with agreeing(group) as facts:
            wait_for_save(world_group())
            folder = checked_folder(path, optimizer)
            facts["the checkpoint's path"] = str(folder)
            facts["whether there is an optimizer"] = str(optimizer is not None)
            facts["whether there is a train state"] = str(train_state is not None)
            check_belongs(train_state, model)
            if train_state is None:
                check_together(model)
            stored = StoredCheckpoint.open(folder)
            facts[f"{folder}/.metadata"] = stored.fingerprint
            rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
            stored.check_sizes(rank, num_ranks)
        with agreeing(group):
            in_place = (MODEL, FUSED) if optimizer is None else (MODEL, FUSED, DENSE)
            stored.verify([*in_place, EXTRA, TRAIN_STATE], rank, num_ranks)
        with agreeing(group):
            extra = stored_extra(stored)
            saved_state = None if train_state is None else _saved_state(train_state, stored)
        restore_train_state = None
        if train_state is not None and saved_state is not None:
            restore_train_state = train_state.prepared(saved_state)
        if stored.checksums is None and rank == 0:
            logger.warning("%s has no checksums: flipped bits in its tables go unnoticed", folder)
        for tables in sharded_tables(model):
            tables.expect_load()
        with dense_state_made(model, optimizer, stored.entries):
            state = live_state(model, optimizer)
            check_fits(group, folder, stored.entries, state)
        _read_in_place(stored, state, process_group=group)
        run_load_hooks(model, optimizer, state)
        if restore_train_state is not None:
            restore_train_state()
        return extra


def _saved_state(train_state: "TrainState", stored: StoredCheckpoint) -> dict[str, torch.Tensor]:
    """Read the train state's entries that this rank needs."""
    if not stored.names(TRAIN_STATE):
        raise CheckpointError(
            f"{stored.folder} has no train state, because it was saved without train_state=...; "
            "load it without one, and set the TrainState's step yourself"
        )
    return stored.tensors(TRAIN_STATE, only=train_state.wants)


Entries = dict[str, STORAGE_TYPES]
"""The shape, type and shards of each of a checkpoint's entries, by name."""


def check_fits(group: dist.ProcessGroup, folder: Place, saved: Entries, state: Any) -> None:
    """Raise on all ranks unless this model could have written the checkpoint.

    Collectives:
        A gather of names and shapes, and an agreement.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    plans: Any = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(planner.create_local_plan(), plans, group=group, group_dst=0)
    with agreeing(group):
        if plans is not None:
            _, expected = planner.create_global_plan(plans)
            for part in state:
                check_part(part, folder, saved, expected)


def check_part(part: str, folder: Place, saved: Entries, expected: Metadata) -> None:
    """Compare a part's entries with those that a save would write now."""
    live = expected.state_dict_metadata
    for name in sorted(name for name in saved.keys() | live if name.startswith(f"{part}.")):
        if part == FUSED and name in saved and name in live:
            _check_column_shards(folder, name, saved, expected)
        saved_kind, model_kind = _kind(saved.get(name)), _kind(live.get(name))
        if saved_kind != model_kind:
            advice = IN_PLACE[part]
            if name in live and _had_dense_optimizer(expected.planner_data[name], saved):
                advice = _WEIGHTS_ALONE
            raise CheckpointError(
                f"{name!r} is {saved_kind} in the checkpoint {folder}, but {model_kind} in the "
                f"model; {advice}"
            )


_WEIGHTS_ALONE = (
    "a dense optimizer has trained this data-parallel table, by its own rule: take the weights "
    "alone, by load_weights(path, model) of torchrec_2dsp.parallel.checkpoint.load before the "
    "model is sharded, with keep_weights=True"
)


def _had_dense_optimizer(path: Sequence[str], saved: Entries) -> bool:
    """Return whether the dense optimizer had the state of a fused state's parameter at the save."""
    is_fused = path[0] == FUSED
    return is_fused and any(name.startswith(f"{DENSE}.state.{path[2]}.") for name in saved)


def _check_column_shards(folder: Place, name: str, saved: Entries, expected: Metadata) -> None:
    """Raise if row-wise moments were saved for other column shards than the plan's."""
    live, param = expected.state_dict_metadata, expected.planner_data[name][2]
    if not all(len(getattr(entries[name], "size", ())) == 1 for entries in (saved, live)):
        return
    stored, planned = (_column_widths(entries[f"{MODEL}.{param}"]) for entries in (saved, live))
    if stored != planned:
        raise CheckpointError(
            f"the row-wise moments of {param!r} are stored for columns {stored} in the checkpoint "
            f"{folder}, but the plan splits the columns {planned}: TorchRec keeps one moment per "
            f"row and column shard; plan the table with column shards {stored}"
        )


def _column_widths(weight: Any) -> str:
    columns = sorted({(chunk.offsets[1], chunk.sizes[1]) for chunk in weight.chunks})
    return "+".join(str(width) for _, width in columns)


def _kind(entry: STORAGE_TYPES | None) -> str:
    if not isinstance(entry, TensorStorageMetadata):
        return "missing" if entry is None else "an object"
    return f"{tuple(entry.size)} {entry.properties.dtype}"


class KnownMetadataReader(dcp.FileSystemReader):
    """Reads tensors from a folder; the metadata are passed in, because DCP would unpickle them."""

    def __init__(self, folder: Place, metadata: Metadata) -> None:
        super().__init__(folder)
        if isinstance(folder, Address):
            open_address(self, str(folder))
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the given metadata."""
        return self._metadata


class PlainDataPlanner(DefaultLoadPlanner):
    """Loads tensors in place, and otherwise only what `torch.load` accepts as plain data."""

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads under current names, not those that old torch versions wrote."""
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a plain value, such as a number or a text, into the state dict."""
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


def _read_in_place(stored: StoredCheckpoint, state: dict[str, Any], **options: Any) -> None:
    """Let DCP read a checkpoint into tensors; ``options`` are passed to `dcp.load`."""
    reader = KnownMetadataReader(stored.folder, stored.metadata)
    run_dcp(
        lambda: dcp.load(state, storage_reader=reader, planner=PlainDataPlanner(), **options),
        f"{stored.folder} couldn't be read and the model may be loaded in part; load another "
        "checkpoint",
    )


@contextmanager
def dense_state_made(
    model: DistributedModelParallel, optimizer: KeyedOptimizer | None, saved: Entries
) -> Iterator[None]:
    """Create the dense optimizer state that a checkpoint holds, and undo it if the block raises.

    The optimizers create it in a step with zero gradients, after which the weights are restored.
    If the block raises, the optimizers are restored, too, as if there had been no step.

    Collectives:
        A sync's, if a backward is pending and ``optimizer`` contains the fused one.
    """
    missing = {} if optimizer is None else _params_without_state(model, optimizer, saved)
    if optimizer is None or not missing:
        yield
        return
    dense = dense_params(model, optimizer)
    steppers = [member for member in _members(optimizer) if _has_one_of(member, missing)]
    fused = model.fused_optimizer
    before = [_Snapshot(stepped) for member in steppers for stepped in _tree(member, fused)]
    try:
        with _weights_kept(list(dense.values())):
            for key, param in dense.items():
                param.grad = torch.zeros_like(param) if key in missing else None
            for member in steppers:
                _step(member)
        yield
    except BaseException:
        for snapshot in before:
            snapshot.restore()
        raise


def _params_without_state(
    model: DistributedModelParallel, optimizer: KeyedOptimizer, saved: Entries
) -> dict[str, Any]:
    """Return the dense parameters whose optimizer state is saved but doesn't exist yet."""
    existing = optimizer.state
    saved_entries: dict[str, set[str]] = defaultdict(set)
    for name in saved:
        key, _, entry = name.removeprefix(f"{DENSE}.state.").rpartition(".")
        saved_entries[key].add(entry)
    return {
        key: param
        for key, param in dense_params(model, optimizer).items()
        if saved_entries[key] - existing.get(param, {}).keys()
    }


def _members(optimizer: KeyedOptimizer) -> list[KeyedOptimizer]:
    """Return the optimizers inside a combined one."""
    if not isinstance(optimizer, CombinedOptimizer):
        return [optimizer]
    return [leaf for _, member in optimizer.optimizers for leaf in _members(member)]


def _has_one_of(optimizer: KeyedOptimizer, params: dict[str, Any]) -> bool:
    ids = {id(param) for param in params.values()}
    return any(id(param) in ids for param in optimizer.params.values())


def _tree(optimizer: Optimizer, fused: Optimizer) -> Iterator[Optimizer]:
    """Yield an optimizer and all optimizers that it steps, except the fused one."""
    if optimizer is fused:
        return
    yield optimizer
    for inner in wrapped_optimizers(optimizer):
        yield from _tree(inner, fused)


def _step(optimizer: KeyedOptimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:  # a user's optimizer can raise anything
        raise CheckpointError(
            f"{type(optimizer).__name__} can't make the state that is saved of it, which takes a "
            f"step ({type(error).__name__}: {error}); let it make a step before the load, or pass "
            "no optimizer to load all the rest"
        ) from error


@contextmanager
def _weights_kept(params: list[torch.Tensor]) -> Iterator[None]:
    before = [(param, param.detach().clone(), param.grad) for param in params]
    try:
        yield
    finally:
        with torch.no_grad():
            for param, value, grad in before:
                param.copy_(value)
                param.grad = grad


class _Snapshot:
    """A copy of everything in an optimizer that a step may change."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = dict(vars(optimizer))
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        # A wrapper's state and groups are those of the optimizer that it wraps.
        self._is_leaf = not wrapped_optimizers(optimizer)
        if self._is_leaf:
            self._groups = [(group, dict(group)) for group in optimizer.param_groups]
            self._states = [(param, state, dict(state)) for param, state in optimizer.state.items()]
        of_params = (state.values() for _, state, _ in self._states)
        self._values = [
            (value, value.clone())
            for value in chain(self._attributes.values(), *of_params)
            if isinstance(value, torch.Tensor)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the optimizer."""
        vars(self._optimizer).clear()
        vars(self._optimizer).update(self._attributes)
        for value, before in self._values:
            value.copy_(before)
        if not self._is_leaf:
            return
        self._optimizer.state.clear()
        for param, state, entries in self._states:
            state.clear()
            state.update(entries)
            self._optimizer.state[param] = state
        for group, entries in self._groups:
            group.clear()
            group.update(entries)


def load_weights(path: str | PathLike[str], model: nn.Module) -> StoredCheckpoint:
    """Read a checkpoint's weights into an unsharded model, in place, in this process only.

    All bytes are first compared with their checksums, and the weights' names and shapes with the
    model's. Nothing in a checkpoint can run code.

    Args:
        path: the folder of a checkpoint, written by `save_checkpoint` on any number of ranks.
        model: the model as it was before it was sharded.

    Returns:
        The checkpoint, for reading more of it.

    Raises:
        CheckpointError: the save didn't finish, a file is damaged, or the model differs.
    """
    folder = place_of(path)
    stored = StoredCheckpoint.open(folder)
    stored.check_sizes(0, 1)
    stored.verify([MODEL], 0, 1)
    state = {MODEL: model.state_dict()}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    _, expected = planner.create_global_plan([planner.create_local_plan()])
    check_part(MODEL, folder, stored.entries, expected)
    with warnings.catch_warnings():
        # That is intended.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        _read_in_place(stored, state, no_dist=True)
    return stored

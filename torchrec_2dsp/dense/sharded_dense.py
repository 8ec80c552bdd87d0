"""`FullyShardedDense` and `TensorParallelDense`: dense parts sharded or split over ranks.

A `JointBatch` runs a split module on several ranks' batches at once:

    rank 0: rows 0 to 5   --gather-->  rows 0 to 9   --module-->  rows 0 to 9  --> rows 0 to 5
    rank 1: rows 6 to 9   ---------->  rows 0 to 9   ---------->  rows 0 to 9  --> rows 6 to 9

Each rank gives its own rows and gets its own back, so the rest of the model, the tables and the
loss know nothing of the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torchrec.distributed.types import LazyAwaitable, ShardingEnv
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_2dsp._compat.ddp import (
    DataParallelWrapper,
    DistributedModelParallel,
    wrapped_module,
)
from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.dense.dense_parts import (
    broadcast_weights,
    check_copies_fit,
    check_untied,
    copies_mesh,
    dense_parts,
    draw_seed,
    drawing_from,
    group_of,
    shares_of,
    styles_by_part,
)
from torchrec_2dsp.errors import ConfigError, UnsupportedError, check_count
from torchrec_2dsp.mesh import DenseMesh


class JointBatch:
    """Gathers a module's inputs over a group's ranks, and takes this rank's rows back.

    Parameter gradients are the mean over the group's ranks of what each rank's loss would give;
    input gradients are what this rank's loss gives. In training, random numbers inside the module,
    such as those of dropout, are the same on all of them.
    """

    def __init__(self, name: str, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._name, self._group = name, group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._calls: list[tuple[list[int], ExitStack]] = []
        """The ranks' numbers of samples, and what ends with the module's call."""
        # Before hooks that are there, which see what the module sees.
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._after, always_call=True)

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather all arguments.

        Collectives:
            An all-gather of sizes and a seed, waited for, then one all-gather per tensor.
        """
        # TorchRec's tables may not have waited for their outputs yet.
        given = _mapped((args, kwargs), lambda lazy: lazy.wait(), is_leaf=_is_lazy)
        leaves = list(_leaves(given))
        if not leaves:
            raise UnsupportedError(f"{self._name!r} is called without tensors, so it has no batch")
        parts = [tensor for leaf in leaves for tensor in _tensors_of(leaf)]
        trains, device = torch.is_grad_enabled(), parts[0].device
        facts = [*(part.shape[0] for part in parts), draw_seed() if trains else 0]
        own = torch.tensor(facts, device=device)
        of_ranks = own.new_empty(self._num_ranks * own.numel())
        dist.all_gather_into_tensor(of_ranks, own, group=self._group)
        *by_part, seeds = of_ranks.view(self._num_ranks, -1).t().tolist()
        gathered = iter(
            [
                cast(torch.Tensor, _Gathered.apply(part, of_part, self._rank, self._group))
                for part, of_part in zip(parts, by_part, strict=True)
            ]
        )
        call = ExitStack()
        if trains:
            call.enter_context(drawing_from(seeds[0], device))
        # Of a jagged tensor the lengths count samples, which come after the values.
        self._calls.append((by_part[isinstance(leaves[0], JaggedTensor)], call))
        return _mapped(given, lambda leaf: _with_tensors(leaf, gathered))

    def _after(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Take this rank's rows; in the backward, gather their gradients."""
        if not self._calls:
            # The call has failed before the module's forward.
            return None
        sizes, call = self._calls.pop()
        call.close()

        def own_rows(rows: Any) -> torch.Tensor:
            if not isinstance(rows, torch.Tensor) or rows.shape[:1] != (sum(sizes),):
                shape = f" {tuple(rows.shape)}" if isinstance(rows, torch.Tensor) else ""
                raise UnsupportedError(
                    f"{self._name!r} gives a {type(rows).__name__}{shape} for {sum(sizes)} "
                    "samples; give tensors whose first dimension is the batch, or lists or dicts "
                    "of them"
                )
            return cast(torch.Tensor, _OwnRows.apply(rows, sizes, self._rank, self._group))

        return _mapped(output, own_rows, is_leaf=_is_result)


class _Gathered(torch.autograd.Function):
    """All ranks' rows. Each rank has the whole gradient of the mean of their losses."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.rank = sizes, rank
        return _gather(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        own = grads[0].split(ctx.sizes)[ctx.rank]
        return own * len(ctx.sizes), None, None, None


class _OwnRows(torch.autograd.Function):
    """This rank's rows, whose loss is a share of the group's mean."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return rows.split(sizes)[rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gather(grads[0], ctx.sizes, ctx.group) / len(ctx.sizes), None, None, None


def _gather(rows: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gather all ranks' rows, one rank after the other."""
    largest = max(sizes)
    own = rows.contiguous()
    if own.shape[0] < largest:
        padding = own.new_zeros(largest - own.shape[0], *own.shape[1:])
        own = torch.cat([own, padding])
    gathered = own.new_empty(len(sizes) * largest, *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own, group=group)
    if min(sizes) == largest:
        return gathered
    parts = gathered.split(largest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _is_leaf(given: Any) -> bool:
    return isinstance(given, KeyedTensor | JaggedTensor) or (
        isinstance(given, torch.Tensor) and given.dim() > 0
    )


def _leaves(given: Any) -> Iterator[Any]:
    """Yield the tensors, keyed and jagged tensors in lists, tuples and dicts."""
    if _is_leaf(given):
        yield given
    elif isinstance(given, list | tuple | dict):
        for part in given.values() if isinstance(given, dict) else given:
            yield from _leaves(part)


def _is_lazy(given: Any) -> bool:
    return isinstance(given, LazyAwaitable)


def _is_result(given: Any) -> bool:
    return isinstance(given, torch.Tensor | KeyedTensor | JaggedTensor)


def _mapped(
    given: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = _is_leaf
) -> Any:
    """Copy lists, tuples and dicts with other leaves."""
    if is_leaf(given):
        return function(given)
    if isinstance(given, dict):
        return {name: _mapped(part, function, is_leaf) for name, part in given.items()}
    if isinstance(given, list | tuple):
        parts = [_mapped(part, function, is_leaf) for part in given]
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    return given


def _tensors_of(leaf: Any) -> list[torch.Tensor]:
    """Return a leaf's tensors, which have a row per sample, or per value."""
    if isinstance(leaf, torch.Tensor):
        return [leaf]
    if isinstance(leaf, KeyedTensor):
        return [leaf.values()]
    weights = leaf.weights_or_none()
    return [leaf.values(), leaf.lengths(), *([] if weights is None else [weights])]


def _with_tensors(leaf: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Rebuild a leaf with other tensors in place of `_tensors_of`."""
    if isinstance(leaf, torch.Tensor):
        return next(tensors)
    if isinstance(leaf, KeyedTensor):
        return KeyedTensor(leaf.keys(), leaf.length_per_key(), next(tensors))
    values, lengths = next(tensors), next(tensors)
    weights = None if leaf.weights_or_none() is None else next(tensors)
    return JaggedTensor(values, weights=weights, lengths=lengths)


class FullyShardedDense(DataParallelWrapper):
    """Shards the dense part's parameters, gradients and moments over the ranks by FSDP2.

    Each rank keeps a shard; a module's parameters are gathered when it runs, and its gradients are
    reduced to their shards. Training equals DDP's.

    Args:
        units: modules whose parameters are gathered together, and freed before the next ones',
            such as a transformer's blocks; without any, all at once.
        num_copies: copies that the ranks hold: with a copy per host, parameters are
            gathered inside hosts, and only gradients travel between them.
        reshard_after_forward: whether parameters are freed after the forward, and gathered
            again in the backward.
        mixed_precision: as FSDP2's ``mp_policy``.
    """

    def __init__(
        self,
        units: Sequence[type[nn.Module]] = (),
        *,
        num_copies: int = 1,
        reshard_after_forward: bool = True,
        mixed_precision: MixedPrecisionPolicy | None = None,
    ) -> None:
        check_count("num_copies", num_copies, owner="FullyShardedDense")
        self._units = tuple(units)
        self._num_copies = num_copies
        self._reshards = reshard_after_forward
        self._precision = mixed_precision or MixedPrecisionPolicy()

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Shard the dense part; TorchRec calls it.

        Collectives:
            An agreement on the settings, process groups, and a broadcast per dense parameter
            and buffer.
        """
        group = group_of(env)
        model = wrapped_module(dmp).to(device)
        with agreeing(group) as facts:
            parts = dict(dense_parts(model, "FullyShardedDense"))
            check_untied(parts, "FullyShardedDense")
            num_ranks = dist.get_world_size(group)
            check_copies_fit("FullyShardedDense", self._num_copies, num_ranks, "ranks")
            self._check_units(parts)
            facts["the settings of FullyShardedDense"] = (
                f"{self._units}, {self._num_copies}, {self._reshards}, {self._precision}"
            )
        ranks = torch.tensor(dist.get_process_group_ranks(group)).view(self._num_copies, -1)
        mesh = copies_mesh(ranks, device.type)
        for part in parts.values():
            broadcast_weights(part, group)
            units = [unit for unit in part.modules() if isinstance(unit, self._units)]
            for module in [*(unit for unit in units if unit is not part), part]:
                fully_shard(
                    module,
                    mesh=mesh,
                    reshard_after_forward=self._reshards,
                    mp_policy=self._precision,
                )

    def _check_units(self, parts: Mapping[str, nn.Module]) -> None:
        modules = [module for part in parts.values() for module in part.modules()]
        for unit in self._units:
            if not any(isinstance(module, unit) for module in modules):
                kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
                raise ConfigError(
                    f"FullyShardedDense(units=...): no module of the dense part is a "
                    f"{unit.__name__}; use some of {kinds}, or leave it out"
                )


class TensorParallelDense(DataParallelWrapper):
    """Splits dense layers over neighbouring ranks, and shards the rest by FSDP2.

    Each rank looks up its own batch. The ranks of a tensor-parallel group gather the split
    module's inputs, compute it together on all their samples, and each takes its own results back.
    A step equals DDP's, and nothing else in the model changes.

    Args:
        plan: torch's style for each module, such as `ColwiseParallel` and `RowwiseParallel`, by
            the module's name in the model, with `*` for any part.
        tp: ranks that compute a layer together, on one host.
        num_copies: copies that the ranks hold, as in `FullyShardedDense`: with a copy
            per host, only gradients travel between hosts.

    Example::

        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        dense = tdsp.TensorParallelDense(
            {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}, tp=2
        )
    """

    def __init__(self, plan: Mapping[str, ParallelStyle], *, tp: int, num_copies: int = 1) -> None:
        if not plan:
            raise ConfigError("TensorParallelDense(plan={}) splits nothing; name some modules")
        check_count("num_copies", num_copies, owner="TensorParallelDense")
        self._plan, self._tp, self._num_copies = dict(plan), tp, num_copies

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Split and shard the dense part; TorchRec calls it.

        Collectives:
            An agreement on the settings, process groups, and a broadcast per dense parameter
            and buffer.
        """
        group = group_of(env)
        model = wrapped_module(dmp).to(device)
        with agreeing(group) as facts:
            parts = dict(dense_parts(model, "TensorParallelDense"))
            check_untied(parts, "TensorParallelDense")
            num_ranks = dist.get_world_size(group)
            mesh = DenseMesh.for_world(
                num_ranks, tp=self._tp, local_world_size=get_local_size(num_ranks)
            )
            units = f"groups of tp={mesh.tp} ranks"
            check_copies_fit("TensorParallelDense", self._num_copies, mesh.dp, units)
            plans = self._by_part(parts)
            names = {name: type(style).__name__ for name, style in self._plan.items()}
            facts["the settings of TensorParallelDense"] = (
                f"{names}, tp={self._tp}, num_copies={self._num_copies}"
            )
        ranks = torch.tensor(dist.get_process_group_ranks(group))
        in_groups = ranks.view(self._num_copies, -1, mesh.tp)
        # FSDP2 wants the axes of shares and of splits in one mesh.
        grid = copies_mesh(in_groups, device.type, ("tp",))
        everyone = copies_mesh(ranks.view(self._num_copies, -1), device.type)
        for name, part in parts.items():
            broadcast_weights(part, group)
            if name not in plans:
                fully_shard(part, mesh=everyone)
                continue
            parallelize_module(part, grid["tp"], plans[name])
            if mesh.dp > 1:
                fully_shard(part, mesh=shares_of(grid))
            JointBatch(name, part, grid["tp"].get_group())

    def _by_part(self, parts: Mapping[str, nn.Module]) -> dict[str, dict[str, ParallelStyle]]:
        """Sort the plan by dense part, with the module names inside it."""
        plans = styles_by_part(
            self._plan,
            parts,
            "TensorParallelDense: no module of the dense part is called {}; the dense part has "
            f"{', '.join(parts) or 'no modules'}",
        )
        for part_name, styles in plans.items():
            if "" in styles:
                raise ConfigError(
                    f"TensorParallelDense: {part_name!r} is a part of the model that holds no "
                    "tables, and runs on the batches of several ranks as a whole; put it into "
                    "a module, and name it there"
                )
        return plans

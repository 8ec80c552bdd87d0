"""`TrainState`: what a run needs to resume, besides the model."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.dense.dense_parts import check_clipping, wrapped_optimizers
from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.checkpoint.coordination import coordination_group
from torchrec_2dsp.parallel.checkpoint.parts import check_wrappers
from torchrec_2dsp.parallel.train_state import model_state
from torchrec_2dsp.parallel.train_state.values import (
    DENSE_GRADIENTS,
    Member,
    Stateful,
    Summable,
    check_left_out,
    check_member,
    check_states,
    digest,
    from_plain,
    kind_of_wrapper,
    load_states,
    random_state,
    restore_random_state,
    stored_member,
    to_plain,
)

HyperParameters = dict[str, list[dict[str, Any]]]
"""For each parameter, all options of its parameter groups, in the optimizer's order."""

_CLASS = "__class__"
"""The option that names torch's optimizer class; the tables' fused classes differ by plan."""


@dataclass(frozen=True)
class RankSummary:
    """A rank's contribution to what all ranks gather at a save."""

    digests: dict[str, str]
    """A digest of each member's state."""
    hyper_parameters: dict[str, HyperParameters]
    """The hyper-parameters of the rank's parameters."""
    iterations: dict[str, int]
    """Each table's number of forwards, as counted by its kernel."""


def joined_hyper_parameters(summaries: Iterable[RankSummary]) -> dict[str, HyperParameters]:
    """Join the hyper-parameters of all ranks' parameters."""
    joined: dict[str, HyperParameters] = {"fused": {}, "dense": {}}
    for rank, summary in enumerate(summaries):
        for kind, by_key in summary.hyper_parameters.items():
            for key, values in by_key.items():
                if joined[kind].setdefault(key, values) != values:
                    raise CheckpointError(
                        f"rank {rank} has the hyper-parameters {values} for {key!r}, and another "
                        f"rank {joined[kind][key]}; set the same schedule on every rank"
                    )
    return joined


FORMAT = 1
MEMBER = "member."
"""The name prefix of members, which users give."""


@dataclass(frozen=True)
class Saved:
    """A train state as read by this rank."""

    header: dict[str, Any]
    own: dict[str, Any] | None
    """The stored state with this rank's number, if there was one."""
    ranks: dict[int, dict[str, Any]]
    """The stored states of the ranks that this one takes over."""
    members: dict[str, list[dict[str, Any]]]
    """Each member's states: a single one, or one for each rank in `ranks`."""
    is_same_world: bool
    """True if the save had as many ranks as there are now."""

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> "Saved":
        """Decode what a rank needs; raise a `CheckpointError` for tensors of another format."""
        header = from_plain(tensors, "")
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise CheckpointError(
                f"the train state isn't of format {FORMAT}, which this release reads; load it with "
                "the release that saved it"
            )
        saved_ranks = range(rank, header["num_ranks"], num_ranks)
        ranks = {number: from_plain(tensors, f"rank{number}.") for number in saved_ranks}
        members = {}
        for name, is_whole in header["is_whole"].items():
            places = [MEMBER] if is_whole else [f"rank{number}.{MEMBER}" for number in saved_ranks]
            members[name] = [from_plain(tensors, f"{place}{name}.") for place in places]
        return cls(header, ranks.get(rank), ranks, members, header["num_ranks"] == num_ranks)


class TrainState:
    """Everything that a run needs to resume, besides the weights and the optimizer state.

    It holds the steps of sync policies, the hot rows in use, what id maps have seen since they last
    evicted, gradients' routes, learning rates and other hyper-parameters, the iterations of
    fused optimizers, the residuals of a `ThresholdedDataParallel`, the gradients in flight of a
    `DelayedDense`, each rank's random number generators, and members that you give by name: objects
    with ``state_dict()`` and ``load_state_dict()``, such as a `HotSetRefresh`, a `RowCounter` or a
    scheduler, and dicts of plain values, which are loaded in place.

    A run that saves a checkpoint with its train state and a run that loads it have the same
    losses, bit for bit, on the same number of ranks and under the same plan.

    Example::

        position = {"file": 0, "batch": 0}
        state = tdsp.TrainState(model, optimizer, scheduler=scheduler, position=position)
        if (path := tdsp.latest_checkpoint("checkpoints")) is not None:
            tdsp.load_checkpoint(path, model, optimizer, train_state=state)
        while state.step < 100_000:
            train_step(model, optimizer, next(batches))
            state.step += 1
            if state.step % 1_000 == 0:
                path = f"checkpoints/{state.step}"
                tdsp.save_checkpoint(path, model, optimizer, train_state=state)
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: KeyedOptimizer | None = None,
        **members: Member,
    ) -> None:
        """Collect everything that has a state.

        Args:
            model: a `ModelParallel2D`, or TorchRec's own `DistributedModelParallel`.
            optimizer: the optimizer of the dense parameters; it may contain the fused one.
            members: anything else with a state, by name. State that is equal on all ranks is stored
                once, other state for each rank.
        """
        if optimizer is not None and not isinstance(optimizer, KeyedOptimizer):
            raise ConfigError(
                f"the hyper-parameters of a {type(optimizer).__name__} have no names; wrap it in "
                "TorchRec's KeyedOptimizerWrapper"
            )
        if optimizer is not None:
            check_wrappers(optimizer)
            check_clipping(model, optimizer)
        for name, member in members.items():
            check_member(name, member)
        model_state.check_names(model)
        self.model = model
        """The model that the run trains."""
        self.optimizer = optimizer
        """An optimizer with hyper-parameters besides the model's fused one, if any."""
        self.step = 0
        """The number of finished steps, which the training loop counts."""
        self._members = dict(members)
        dense_gradients = data_parallel_wrapper(model)
        if isinstance(dense_gradients, Stateful):
            if DENSE_GRADIENTS in members:
                raise ConfigError(
                    f"{DENSE_GRADIENTS} is the name of the state of the model's "
                    f"{type(dense_gradients).__name__}; give your member another name"
                )
            self._members[DENSE_GRADIENTS] = dense_gradients

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state as flat tensors; call it on all ranks, between two steps.

        A single rank's entries begin with ``rank<N>.``, and only this rank has them; rank 0 has
        the others.

        Collectives:
            A sync's, if a backward is pending; then two all-gathers of objects, and those of id
            maps' `histories`.
        """
        group, model = coordination_group(), self.model
        model_state.complete_model(model)
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        with agreeing(group) as facts:
            if type(self.step) is not int or self.step < 0:
                raise ConfigError(f"step={self.step!r} is no number of steps; count them from 0")
            facts["the number of steps done"] = str(self.step)
            facts["the members of the TrainState"] = ", ".join(sorted(self._members))
            stored = {name: stored_member(name, member) for name, member in self._members.items()}
            summary = RankSummary(
                {name: digest(tensors) for name, tensors in stored.items()},
                {kind: hyper_parameters(*pair) for kind, pair in self._optimizers().items()},
                model_state.iterations(model),
            )
            # Values that can't be stored raise here, where all ranks notice.
            to_plain(summary.hyper_parameters, "")
            own = to_plain(
                {**model_state.rank_state(model), "random": random_state(self._device)},
                f"rank{rank}.",
            )
        summaries: list[RankSummary] = [summary] * num_ranks
        dist.all_gather_object(summaries, summary, group=group)
        parameters = joined_hyper_parameters(summaries)
        model_state.settle(model)
        is_whole = {
            name: not isinstance(member, Summable)
            and len({summary.digests[name] for summary in summaries}) == 1
            for name, member in self._members.items()
        }
        for name, tensors in stored.items():
            place = MEMBER if is_whole[name] else f"rank{rank}.{MEMBER}"
            if rank == 0 or not is_whole[name]:
                own |= {f"{place}{key}": tensor for key, tensor in tensors.items()}
        whole = model_state.whole_state(model)
        if rank == 0:
            header = {
                "format": FORMAT,
                "step": self.step,
                "num_ranks": num_ranks,
                "is_whole": is_whole,
                "wrapper": kind_of_wrapper(self._members.get(DENSE_GRADIENTS)),
                "hyper_parameters": parameters,
                "iterations": {
                    name: max(part.iterations[name] for part in summaries)
                    for name in summary.iterations
                },
                "model": whole,
            }
            own |= to_plain(header, "")
        return own

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore a state; call it on all ranks, after the model and its optimizer were loaded.

        Args:
            tensors: the state, at least the entries that `wants` names.

        Collectives:
            `prepared`'s and those of the function that it returns.
        """
        self.prepared(tensors)()

    def wants(self, name: str) -> bool:
        """Return whether this rank needs an entry: a shared one, or its own.

        If there are fewer ranks than at the save, each takes over several ranks' entries.
        """
        saved_rank = re.match(r"rank(\d+)\.", name)
        group = coordination_group()
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        return saved_rank is None or int(saved_rank[1]) % num_ranks == rank

    def prepared(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Check a state without changing anything; call it on all ranks.

        Args:
            tensors: the state, at least the entries that `wants` names.

        Returns:
            A function that restores the state, to be called on all ranks after the model was
            loaded.

        Collectives:
            An agreement of all ranks; in the returned function, another one, and
            broadcasts of DDP's buckets.
        """
        group = coordination_group()
        with agreeing(group):
            try:
                saved = Saved.read(tensors, dist.get_rank(group), dist.get_world_size(group))
                self._check(saved)
            except (KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(
                    f"the train state is damaged ({type(error).__name__}: {error}); load another "
                    "checkpoint"
                ) from error
        digests = [""] * dist.get_world_size(group)
        plan = model_state.plan_digest(self.model)
        own = saved.own
        has_same_plan = own is not None and saved.is_same_world and plan == own["plan"]
        dist.all_gather_object(digests, plan if has_same_plan else "", group=group)
        is_same_plan = "" not in digests

        def restore() -> None:
            with agreeing(group):
                self._restore(saved, is_same_plan=is_same_plan)
            model_state.restore_gradient_orders(
                self.model, saved.header["model"]["gradient_orders"]
            )
            if own is not None:
                restore_random_state(own["random"], self._device)

        return restore

    def _check(self, saved: Saved) -> None:
        """Raise unless the state fits this run."""
        model_state.check_whole_state(self.model, saved.header["model"])
        wrapper = saved.header.get("wrapper")
        if wrapper not in (None, kind_of_wrapper(self._members.get(DENSE_GRADIENTS))):
            # This model's wrapper would misread it, and starts as after a save without a wrapper.
            check_left_out(saved.members.pop(DENSE_GRADIENTS, ()), wrapper)
        for name in sorted(saved.members.keys() ^ self._members.keys()):
            if name == DENSE_GRADIENTS:
                check_left_out(saved.members.get(name, ()))
                continue
            raise CheckpointError(
                f"the train state was saved with {name!r}; make the TrainState with {name}=..."
                if name in saved.members
                else f"the train state was saved without {name!r}; make the TrainState without it"
            )
        for name in saved.members.keys() & self._members.keys():
            member, states = self._members[name], saved.members[name]
            is_whole = saved.header["is_whole"][name]
            if not (is_whole or saved.is_same_world or isinstance(member, Summable)):
                raise CheckpointError(
                    f"{name!r} was another on each of {saved.header['num_ranks']} ranks and can't "
                    "be spread over another number of them; start as many ranks, or load into a "
                    f"model without train_state and set {name!r} by hand"
                )
            check_states(name, member, states)
        for kind, optimizers in self._optimizers().items():
            check_hyper_parameters(saved.header["hyper_parameters"][kind], *optimizers)

    def _restore(self, saved: Saved, *, is_same_plan: bool) -> None:
        model, header = self.model, saved.header
        self.step = header["step"]
        for name, member in self._members.items():
            load_states(name, member, saved.members.get(name, [{}]))
        for kind, optimizers in self._optimizers().items():
            restore_hyper_parameters(header["hyper_parameters"][kind], *optimizers)
        # Pass the learning rates to the kernels, then the optimizers' other hyper-parameters.
        model.fused_optimizer.step()
        model_state.restore_optimizer_arguments(model)
        model_state.restore_whole_state(model, header["model"], step=self.step)
        if is_same_plan and saved.own is not None:
            model_state.restore_rank_state(model, saved.own)
        else:
            model_state.restore_iterations(model, header["iterations"])
        num_bad_ids = [rank_state["num_bad_ids"] for rank_state in saved.ranks.values()]
        model_state.restore_bad_ids(model, num_bad_ids)

    def _optimizers(self) -> dict[str, tuple[KeyedOptimizer, KeyedOptimizer | None]]:
        """Return both optimizers, each with the optimizer whose groups in it are left out."""
        fused = self.model.fused_optimizer
        dense = {} if self.optimizer is None else {"dense": (self.optimizer, fused)}
        return {"fused": (fused, None), **dense}

    @property
    def _device(self) -> torch.device:
        return torch.device(getattr(self.model, "device", "cpu"))


def hyper_parameters(
    optimizer: KeyedOptimizer, but: KeyedOptimizer | None = None
) -> HyperParameters:
    """Return the hyper-parameters of this rank's parameters.

    Args:
        optimizer: the optimizer whose groups are read.
        but: an optimizer that it may contain, whose groups are left out.
    """
    classes = _classes(optimizer)
    by_key: HyperParameters = defaultdict(list)
    for keys, group in _groups(optimizer, but):
        options = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for key in keys:
            by_key[key].append({**options, _CLASS: classes.get(id(group), "")})
    return dict(by_key)


def check_hyper_parameters(
    saved: Mapping[str, Any], optimizer: KeyedOptimizer, but: KeyedOptimizer | None = None
) -> None:
    """Raise unless hyper-parameters are saved for each of this rank's parameter groups."""
    classes = _classes(optimizer)
    for keys, group, options in _saved_groups(saved, optimizer, but):
        for key, of_key in zip(keys, options, strict=True):
            if of_key != options[0]:
                raise CheckpointError(
                    f"{keys[0]!r} and {key!r} are in one group of the optimizer, but had different "
                    "hyper-parameters when they were saved; group the parameters as they were"
                )
        saved_class, own_class = options[0].get(_CLASS), classes.get(id(group))
        if saved_class and own_class and saved_class != own_class:
            raise CheckpointError(
                f"{keys[0]!r} was trained by {saved_class}, and is by {own_class} now; pass the "
                "optimizer that was saved, or load the weights alone, without train_state"
            )


def restore_hyper_parameters(
    saved: Mapping[str, Any], optimizer: KeyedOptimizer, but: KeyedOptimizer | None = None
) -> None:
    """Write saved hyper-parameters into the optimizer's groups."""
    for _, group, (options, *_) in _saved_groups(saved, optimizer, but):
        for name, value in options.items():
            if isinstance(group.get(name), torch.Tensor):
                with torch.no_grad():
                    group[name].copy_(torch.as_tensor(value))
            elif name != _CLASS:
                group[name] = value


def _saved_groups(
    saved: Mapping[str, Any], optimizer: KeyedOptimizer, but: KeyedOptimizer | None
) -> Iterator[tuple[list[str], dict[str, Any], list[dict[str, Any]]]]:
    """Yield each group with its parameters' names, and their saved options in it.

    An optimizer may have several groups for a parameter, like TorchRec's SemisyncOptimizer. Older
    states hold only the last group's options: such groups stay as they were built.
    """
    groups = list(_groups(optimizer, but))
    counts = Counter(key for keys, _ in groups for key in keys)
    numbers = Counter[str]()
    for keys, group in groups:
        options = []
        for key in keys:
            if key not in saved:
                raise CheckpointError(
                    f"the train state has no hyper-parameters of {key!r}; pass the optimizer that "
                    "was saved"
                )
            of_key = saved[key]
            if isinstance(of_key, Mapping):
                of_key = [of_key if counts[key] == 1 else {}] * counts[key]
            if len(of_key) != counts[key]:
                raise CheckpointError(
                    f"the train state has hyper-parameters of {len(of_key)} groups with {key!r}, "
                    f"and the optimizer has {counts[key]}; pass the optimizer that was saved"
                )
            options.append(of_key[numbers[key]])
            numbers[key] += 1
        yield keys, group, options


def _groups(
    optimizer: KeyedOptimizer, but: KeyedOptimizer | None
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield each group that has parameters, with their names."""
    excluded = {id(group) for group in but.param_groups} if but is not None else set()
    names = {id(param): key for key, param in optimizer.params.items()}
    groups: Any = optimizer.param_groups
    for group in groups:
        keys = [names[id(param)] for param in group["params"] if id(param) in names]
        if id(group) not in excluded and keys:
            yield keys, group


def _classes(optimizer: Optimizer) -> dict[int, str]:
    """Return the torch optimizer class that updates each group, by the group's id."""
    wrapped = wrapped_optimizers(optimizer)
    if not wrapped and not isinstance(optimizer, KeyedOptimizer):
        return {id(group): type(optimizer).__name__ for group in optimizer.param_groups}
    return dict(chain.from_iterable(_classes(part).items() for part in wrapped))

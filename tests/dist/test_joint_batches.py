"""Joint batches: ranks gather a split module's inputs, and take back their own outputs."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from tests.support.dense_training import cell_of
from tests.support.models import make_batch
from tests.support.ranks import RankPool, error_of, error_text
from torchrec_2dsp.dense.joint_batch import JointBatch
from torchrec_2dsp.errors import UnsupportedError

pytestmark = pytest.mark.dealt_file


class Sums(nn.Module):
    """Accepts every input type that a joint batch can gather; returns each sample's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(
        self, rows: torch.Tensor, scale: float, *, more: dict[str, Any]
    ) -> dict[str, list[torch.Tensor]]:
        jagged, keyed = more["jagged"], more["keyed"]
        samples = torch.arange(jagged.lengths().numel()).repeat_interleave(jagged.lengths())
        sums = torch.zeros(rows.shape[0]).index_add(0, samples, jagged.values())
        sums += more["number"]
        return {"sums": [scale * self.weight * (rows.sum(1) + sums + keyed["f"].sum(1))]}


def gather_and_take_back(rank: int, world_size: int, sizes: list[int]) -> None:
    """Compare outputs and gradients with each rank alone; the parameter's gradient is the mean."""
    size = sizes[rank]
    generator = torch.Generator().manual_seed(rank)
    rows = torch.rand(size, 3, generator=generator, requires_grad=True)
    lengths = torch.randint(0, 4, (size,), generator=generator)
    values = torch.rand(int(lengths.sum()), generator=generator, requires_grad=True)
    keyed = torch.rand(size, 2, generator=generator, requires_grad=True)
    given = {
        "jagged": JaggedTensor(values, lengths=lengths),
        "keyed": KeyedTensor(["f"], [2], keyed),
        # gloo doesn't know this type.
        "number": torch.full((size,), rank, dtype=torch.int16),
    }
    alone, joint = Sums(), Sums()
    group = torch.distributed.group.WORLD
    assert group is not None
    JointBatch("sums", joint, group)
    gradients = []
    for module in (alone, joint):
        (actual,) = module(rows, 3.0, more=given)["sums"]
        inputs = (rows, values, keyed)
        gradients.append(
            [actual, *torch.autograd.grad(actual.square().sum(), (*inputs, module.weight))]
        )
    for by_itself, together in zip(gradients[0][:-1], gradients[1][:-1], strict=True):
        torch.testing.assert_close(together, by_itself)
    mean = gradients[0][-1].clone()
    torch.distributed.all_reduce(mean)
    torch.testing.assert_close(gradients[1][-1], mean / world_size)


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [5, 1, 2, 7], [4, 0, 1, 0]], ids=str)
def test_ranks_get_what_they_would_alone(ranks4: RankPool, sizes: list[int]) -> None:
    ranks4.run(gather_and_take_back, sizes)


@dataclass(frozen=True)
class Rows:
    """A batch's rows, with a number that isn't per row."""

    rows: torch.Tensor
    scale: float = 3.0


class Output(OrderedDict[str, Any]):
    """A dict whose values are attributes, too, like Hugging Face's."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Contained(nn.Linear):
    """A layer that takes and returns tensor containers."""

    def forward(self, input: Any, *_: Any) -> Any:
        rows = super().forward(input.rows) * input.scale
        return Output(rows=rows, more=Rows(rows * 2, 1.0), maximum=rows.max(dim=1), no=None)


class Giving(nn.Linear):
    """A layer that returns a function's result on its rows."""

    give: Callable[[torch.Tensor], Any]

    def forward(self, input: torch.Tensor) -> Any:
        return self.give(super().forward(input))


def pass_containers(rank: int, world_size: int) -> list[str]:
    """Compare rows in containers with each rank alone; return errors for refused ones."""
    group = torch.distributed.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    alone, joint = Contained(3, 2), Contained(3, 2)
    joint.load_state_dict(alone.state_dict())
    JointBatch("contained", joint, group)
    rows = Rows(torch.full((2 + rank, 3), float(rank)))
    by_itself, together = alone(rows), joint(rows)
    assert isinstance(together, Output)
    assert isinstance(together.more, Rows)
    assert together.keys() == by_itself.keys()
    assert together.no is None
    torch.testing.assert_close(together.rows, by_itself.rows)
    torch.testing.assert_close(together.more.rows, by_itself.more.rows)
    assert type(together.maximum) is type(by_itself.maximum)
    torch.testing.assert_close(together.maximum.values, by_itself.maximum.values)
    giving = Giving(3, 2)
    JointBatch("giving", giving, group)
    features = make_batch(cell_of(world_size).spec, rank)
    unknown = [torch.ones(()), (row for row in torch.ones(2, 2)), features]
    unknown += [{torch.ones(2)}, SimpleNamespace(rows=torch.ones(2)), MappingProxyType(vars(rows))]
    texts = [
        error_of(partial(joint, rows, given))
        for given in [*unknown, torch.tensor(1), SimpleNamespace(eps=1.0), torch.relu, "sum"]
    ]
    for give in (iter, lambda rows: SimpleNamespace(rows=rows), lambda rows: {rows}):
        giving.give = give
        texts.append(error_text(partial(giving, torch.ones(2, 3)), UnsupportedError))
    return texts


def test_containers_are_passed_or_refused(ranks4: RankPool) -> None:
    (texts,) = {tuple(texts) for texts in ranks4.run(pass_containers)}
    kinds = ["Tensor ()", "generator", "KeyedJaggedTensor", "set", "SimpleNamespace"]
    for kind, text in zip([*kinds, "mappingproxy"], texts[:6], strict=True):
        assert text.startswith(
            f"UnsupportedError: 'contained' is given a {kind}, which can't be joined with other"
        )
    assert texts[6:10] == ("", "", "", "")
    for kind, text in zip(["tuple_iterator", "SimpleNamespace", "set"], texts[10:], strict=True):
        assert text.startswith(f"'giving' gives a {kind} for 8 samples; give tensors")


class Noting(nn.Linear):
    """A layer that writes into its arguments."""

    def forward(self, input: torch.Tensor, *given: Any) -> torch.Tensor:
        outputs, (terms, by_name) = super().forward(input), given
        terms.append(outputs.mean())
        by_name["inner"]["term"] = outputs.mean()
        return outputs


def write_into_containers(rank: int, world_size: int) -> tuple[float, float, float]:
    group = torch.distributed.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    joint, terms, by_name = Noting(3, 2), list[Any](), {"inner": dict[str, Any](), "scale": 2.0}
    JointBatch("noting", joint, group)
    mean = joint(torch.full((2, 3), float(rank)), terms, by_name).mean().detach()
    torch.distributed.all_reduce(mean)
    (term,) = terms
    return term.item(), by_name["inner"]["term"].item(), mean.item() / world_size


def test_callers_get_what_a_module_writes_into_containers_without_tensors(
    ranks4: RankPool,
) -> None:
    for term, named_term, mean in ranks4.run(write_into_containers):
        assert term == named_term == pytest.approx(mean)


class Narrow(nn.Linear):
    """A layer that uses its rows' first column, and ignores all else."""

    def forward(self, input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return super().forward(input.reshape(len(input), -1)[:, :1].float())


ROWS = torch.ones(2, 3)
LENGTHS = torch.tensor([1, 2])
UNLIKE: list[tuple[tuple[Any, ...], tuple[Any, ...], str]] = [
    (
        (ROWS.double(),),
        (ROWS.long(),),
        "'narrow' with 0: int64[batch, 3] with gradients, but",
    ),
    (
        (ROWS[:, :2],),
        (ROWS,),
        "'narrow' with 0: float32[batch, 3] with gradients, but rank 0 ",
    ),
    ((ROWS[..., None],), (ROWS,), "of its tensor-parallel group with 0: float32[batch, 3, 1] with"),
    ((ROWS,), (ROWS, ROWS), "with 0: float32[batch, 3], 1: float32[batch, 3] with gradients, but"),
    (
        (ROWS, JaggedTensor(ROWS[0], lengths=LENGTHS)),
        (ROWS, JaggedTensor(ROWS[0], lengths=LENGTHS, weights=ROWS[0])),
        "JaggedTensor(float32[batch], int64[batch], float32[batch]) with gradients, but",
    ),
    (
        (ROWS, KeyedTensor(["a", "b"], [1, 2], ROWS)),
        (ROWS, KeyedTensor(["b", "a"], [2, 1], ROWS)),
        "KeyedTensor(float32[batch, 3], {'b': 2, 'a': 1}) with gradients, but",
    ),
    ((ROWS, {"a": ROWS, "b": ROWS}), (ROWS, {"b": ROWS, "a": ROWS}), "1.b: float32[batch, 3], 1.a"),
    ((ROWS,), (), "'narrow' is called without tensors, so it has no batch (found on rank 1)"),
    ((ROWS,), (ROWS, iter(ROWS)), "'narrow' is given a tuple_iterator, which can't be joined"),
]
"""Arguments on rank 0, arguments on the others, and a part of the error."""


def call_unlike(rank: int, world_size: int) -> list[str]:
    """Give ranks arguments that can't be joined, then more tensors than fit into one message."""
    torch.manual_seed(0)
    narrow, group = Narrow(1, 1), torch.distributed.group.WORLD
    assert group is not None
    JointBatch("narrow", narrow, group)
    texts = [error_of(partial(narrow, *(others if rank else first))) for first, others, _ in UNLIKE]
    with torch.set_grad_enabled(rank > 0):
        texts.append(error_of(partial(narrow, ROWS)))
    with torch.autocast("cpu", torch.bfloat16, enabled=rank > 0):
        texts.append(error_of(partial(narrow, ROWS)))
    many = [torch.full((2 + rank + n % 3, 1), float(rank)) for n in range(70)]
    assert narrow(many[0], many[1:]).shape == (2 + rank, 1)
    return texts


def test_batches_that_do_not_fit_are_refused_on_all_ranks(ranks4: RankPool) -> None:
    (texts,) = {tuple(texts) for texts in ranks4.run(call_unlike, timeout_s=40)}
    states = ["with gradients, but", "with gradients, under autocast to bfloat16, but"]
    expected = [text for _, _, text in UNLIKE]
    for text, part in zip(texts, [*expected, *states], strict=True):
        assert part in text
    for text in (*texts[:-4], *texts[-2:]):
        assert text.startswith("InputError: rank 1 calls 'narrow' with ")
        assert text.endswith("but for the number of samples, and call it on all of them alike")


def give_candidates(rank: int, world_size: int) -> list[str]:
    """Give all ranks equal rows beside a batch, then flat values, of which ranks have others."""
    group = torch.distributed.group.WORLD
    assert group is not None
    narrow, candidates = Narrow(1, 1), torch.arange(5.0)
    JointBatch("narrow", narrow, group)
    rows = torch.full((2 + rank, 3), float(rank))
    given = [candidates, candidates + rank, candidates[: rank + 1], candidates[:0], rows]
    return [error_of(partial(narrow, rows, more=[other])) for other in given]


def test_what_is_no_batch_is_refused_if_it_shows(ranks4: RankPool) -> None:
    for rank, (text, *others) in enumerate(ranks4.run(give_candidates)):
        assert text.startswith(
            f"UnsupportedError: 'narrow' is given a Tensor (5,) that is equal on all ranks, for "
            f"{2 + rank} samples, but arguments are joined over ranks; make"
        )
        assert others == [""] * 4


def penalize(rank: int, world_size: int) -> list[str]:
    """Take second gradients, for inputs or weights, through a split layer."""
    layer, group = nn.Linear(3, 1), torch.distributed.group.WORLD
    assert group is not None
    JointBatch("layer", layer, group)
    rows = torch.ones(2, 3, requires_grad=True)
    texts = []
    for of in (rows, layer.weight):
        outputs = layer(rows).tanh()
        (gradient,) = torch.autograd.grad(outputs.sum(), of, create_graph=True)
        texts.append(error_text(gradient.sum().backward, UnsupportedError))
    return texts


def test_gradients_of_gradients_are_refused(ranks4: RankPool) -> None:
    for texts in ranks4.run(penalize):
        for text in texts:
            assert text.startswith(
                "a second derivative (create_graph=True) through a module that TensorParallelDense "
                "has split isn't computed; leave terms"
            )


class Failing(nn.Linear):
    """A layer that fails on a condition that all ranks see."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such samples")


def draw_after_an_error(rank: int, world_size: int) -> float:
    layer, group = Failing(2, 1), torch.distributed.group.WORLD
    assert group is not None
    JointBatch("failing", layer, group)
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="no such samples"):
        layer(torch.ones(3, 2))
    with pytest.raises(UnsupportedError, match="without tensors"):
        layer()
    return float(torch.rand(()))


def test_ranks_draw_their_own_numbers_after_an_error(ranks4: RankPool) -> None:
    assert len(set(ranks4.run(draw_after_an_error))) == 4

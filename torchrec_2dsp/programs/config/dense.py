"""`DensePartConfig`: the training method for the dense part; one class per kind."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.dense.preconditioner import Preconditioning
from torchrec_2dsp.mesh import RankLayout
from torchrec_2dsp.programs.config.section import Kinds, Section


class _DenseSection(Section):
    is_other_algorithm: ClassVar[bool] = False
    """True if results differ from DDP's by more than rounding."""

    words: ClassVar[str] = ""
    """The difference from DDP, in words, with the values of keys; empty if there is none."""

    @property
    def kind_text(self) -> str:
        """The kind's difference from DDP, in words; empty if there is none."""
        return self.words.format(**self.model_dump())

    @property
    def text(self) -> str:
        """All differences from DDP in fp32, in words; empty if there are none."""
        is_fp32 = getattr(self, "autocast", "fp32") == "fp32"
        return ", ".join(filter(None, (self.kind_text, "" if is_fp32 else "computed in bf16")))


class _AutocastSection(_DenseSection):
    autocast: Literal["fp32", "bf16"] = "fp32"
    """The type in which `torch.autocast` lets training multiply matrices. Weights, lookups,
    gradients between ranks and evaluations stay in fp32."""


class _WarmUp(_AutocastSection):
    warm_up: int = Field(default=10, ge=2)
    """The number of first steps that send all gradients without delay."""


class DDPConfig(_AutocastSection):
    """Plain DDP."""

    kind: Literal["ddp"] = "ddp"


class FP16Config(_AutocastSection):
    """DDP with torch's fp16 hook."""

    kind: Literal["fp16"] = "fp16"
    words: ClassVar[str] = "dense gradients in fp16"


class PowerSGDConfig(_WarmUp):
    """DDP with torch's PowerSGD hook."""

    kind: Literal["powersgd"] = "powersgd"
    is_other_algorithm: ClassVar[bool] = True
    words: ClassVar[str] = "dense gradients by PowerSGD of rank {rank}"

    rank: int = Field(default=2, ge=1)
    """The rank of the matrices."""


class ThresholdedConfig(_WarmUp):
    """Sends only the gradients' largest elements."""

    kind: Literal["thresholded"] = "thresholded"
    is_other_algorithm: ClassVar[bool] = True

    density: float = Field(default=0.005, gt=0, le=1)
    """The share of elements that are sent in a step."""

    preconditioner: Preconditioning = Preconditioning.NONE
    """none, or the rule with which ranks compute updates before they send: adagrad or adam. The
    dense optimizer is then sgd."""

    values: Transport = Transport.BF16
    """The elements' wire format: fp32, bf16, fp16, int8 or int4."""

    route: Literal["auto", "gather", "owners", "dense"] = "auto"
    """The route for the sums; "auto" takes the one that sends least."""

    @property
    def kind_text(self) -> str:
        """The difference from DDP, in words."""
        what = "gradients"
        if self.preconditioner is not Preconditioning.NONE:
            what = f"{self.preconditioner.value} updates"
        return f"{self.density:.3%} of dense {what}, in {self.values.value}"


class DelayedConfig(_WarmUp):
    """Applies gradients one step late."""

    kind: Literal["delayed"] = "delayed"
    is_other_algorithm: ClassVar[bool] = True
    words: ClassVar[str] = "dense gradients one step late"


class FullyShardedConfig(_AutocastSection):
    """FSDP2: each rank holds a share of the weights."""

    kind: Literal["fully_sharded"] = "fully_sharded"
    words: ClassVar[str] = "dense part fully sharded, in {num_copies} copies"

    num_copies: int = Field(default=1, ge=1)
    """The number of dense part copies over all ranks."""


class TensorParallelConfig(_AutocastSection):
    """Several ranks compute each layer together."""

    kind: Literal["tensor_parallel"] = "tensor_parallel"
    words: ClassVar[str] = "layers split over {tp} ranks, in {num_copies} copies"

    tp: int = Field(default=1, ge=1)
    """The number of ranks that compute a layer together."""

    num_copies: int = Field(default=1, ge=1)
    """The number of dense part copies over all ranks."""


class PipelinedConfig(_DenseSection):
    """Ranks compute the layers one after the other."""

    kind: Literal["pipelined"] = "pipelined"

    num_stages: int = Field(default=2, ge=2)
    """The number of stages, over which layers are divided."""

    num_micro_batches: int = Field(default=8, ge=1)
    """The number of micro-batches into which a pipeline's joint batches are divided."""

    schedule: str = "1F1B"
    """The pipeline schedule: the order in which ranks compute."""

    layout: RankLayout = RankLayout.CONTIGUOUS
    """The ranks in a pipeline: neighbours (contiguous), or strided, so that ranks with the same
    layers are neighbours."""

    tp: int = Field(default=1, ge=1)
    """The number of ranks that compute a layer together."""

    fully_shard: bool = False
    """Shard each layer among pipelines, instead of keeping a copy in each."""

    recut_every: int = Field(default=0, ge=0)
    """The number of training steps between re-cuts, which move layers between stages by measured
    times if that makes the slowest stage faster; 0 for none."""

    @model_validator(mode="after")
    def _check_recut(self) -> Self:
        if self.tp > 1 or self.fully_shard:
            self.refuse_unread(
                ["recut_every"],
                "moves whole layers between ranks, and with tp > 1 or fully_shard=true ranks have "
                "parts of them; leave it out",
            )
        return self

    @property
    def kind_text(self) -> str:
        """The difference from DDP, in words."""
        sharded = ", sharded" if self.fully_shard else ""
        split = f", layers split over {self.tp} ranks" if self.tp > 1 else ""
        return (
            f"{self.num_stages} stages, {self.schedule}, {self.num_micro_batches} micro-batches, "
            f"{self.layout.value}{sharded}{split}"
        )


class PlannedDenseConfig(_DenseSection):
    """The exact kind with the fastest predicted step."""

    kind: Literal["planned"] = "planned"
    words: ClassVar[str] = "dense part by predicted cost"


class LocalConfig(_AutocastSection):
    """Ranks train independently and average every few steps."""

    kind: Literal["local"] = "local"
    is_other_algorithm: ClassVar[bool] = True
    words: ClassVar[str] = "dense parts that meet every {local_steps} steps"

    local_steps: int = Field(default=16, ge=1)
    """The number of steps between two meetings."""

    meeting_density: float = Field(default=1.0, gt=0, le=1)
    """The share of all changes that ranks send when they meet."""

    values: Transport = Transport.BF16
    """The changes' wire format, if not all are sent."""

    outer_lr: float = Field(default=0.7, gt=0)
    """The learning rate of the mean change."""

    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """The momentum of the mean changes."""

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.meeting_density == 1:
            self.refuse_unread(["values"], "is for meeting_density < 1; set it, or leave it out")
        return self


DenseKinds = (
    DDPConfig
    | FP16Config
    | PowerSGDConfig
    | ThresholdedConfig
    | DelayedConfig
    | FullyShardedConfig
    | TensorParallelConfig
    | PipelinedConfig
    | PlannedDenseConfig
    | LocalConfig
)
"""Any kind of dense part."""

_OF_LAYERS = (TensorParallelConfig, PipelinedConfig, PlannedDenseConfig)
"""Kinds that share the layers of a `LayerStack`."""

DensePartConfig = Annotated[DenseKinds, Kinds()]
"""A section ``dense``, with DDP as the default kind."""


def check_dense(
    key: str, dense: DenseKinds, model: str, calibration: str, optimizer: str, clip_norm: float = 0
) -> None:
    """Raise `ValueError` if a dense part lacks the model, calibration or optimizer it needs."""
    if isinstance(dense, _OF_LAYERS) and model != "sequence":
        raise ValueError(
            f'{key}.dense.kind="{dense.kind}" is for models with a LayerStack, and model.kind is '
            f'"{model}"; use model.kind="sequence", or another kind of dense part'
        )
    if isinstance(dense, PlannedDenseConfig) and not calibration:
        raise ValueError(
            f'{key}.dense.kind="planned" needs to know the machines; give a calibration'
        )
    gives_updates = isinstance(dense, ThresholdedConfig) and (
        dense.preconditioner is not Preconditioning.NONE
    )
    if gives_updates and (optimizer != "sgd" or clip_norm):
        raise ValueError(
            f"{key}.dense.preconditioner gives updates instead of gradients, for an optimizer that "
            'applies them as they are; set optimizer.dense_optimizer="sgd" and leave '
            "optimizer.dense_clip_norm out"
        )

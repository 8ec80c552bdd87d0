"""`DenseGradientsConfig`: how ranks add up the gradients of what isn't sharded."""

from typing import Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.mesh import RankLayout
from torchrec_2dsp.programs.config.section import Section


class DenseGradientsConfig(Section):
    """How ranks add up the gradients of what isn't sharded."""

    kind: Literal[
        "ddp",
        "fp16",
        "powersgd",
        "thresholded",
        "delayed",
        "fully_sharded",
        "tensor_parallel",
        "pipelined",
        "planned",
        "local",
    ] = "ddp"
    """DDP as it is, torch's fp16 hook, PowerSGD, only the largest elements; gradients of the step
    before; FSDP2, where each rank holds a share; layers that ranks compute together, or one after
    the other; what is predicted to be fastest of the exact ones; or ranks that train by themselves
    and meet every few steps."""

    density: float = Field(default=0.005, gt=0, le=1)
    """The share of elements that "thresholded" sends in a step."""

    values: Transport = Transport.BF16
    """How the elements of "thresholded" travel: fp32, bf16, fp16, int8 or int4."""

    route: Literal["auto", "gather", "owners", "dense"] = "auto"
    """How "thresholded" makes sums; "auto" takes what sends least."""

    rank: int = Field(default=2, ge=1)
    """The rank of the matrices of "powersgd"."""

    num_copies: int = Field(default=1, ge=1)
    """How many times the ranks hold the dense part, if it is "fully_sharded" or
    "tensor_parallel"."""

    tp: int = Field(default=1, ge=1)
    """How many ranks compute a layer together, if it is "tensor_parallel" or "pipelined"."""

    num_stages: int = Field(default=2, ge=2)
    """Into how many parts "pipelined" layers are cut."""

    num_micro_batches: int = Field(default=8, ge=1)
    """Into how many parts the batches of a pipeline are cut together."""

    schedule: str = "1F1B"
    """In which order the ranks of a pipeline work."""

    layout: RankLayout = RankLayout.CONTIGUOUS
    """Whether the ranks of a pipeline are neighbours, or strided: then those that hold the same
    layers are."""

    fully_shard: bool = False
    """Whether each pipeline keeps a share of each layer, instead of a copy."""

    recut_every: int = Field(default=0, ge=0)
    """After how many steps of training "pipelined" layers are cut anew, by what they took, where
    that makes the slowest stage faster; 0 leaves the cuts as they are."""

    local_steps: int = Field(default=16, ge=1)
    """Every so many steps the ranks of "local" meet."""

    meeting_density: float = Field(default=1.0, gt=0, le=1)
    """The share of all changes that the ranks of "local" send when they meet."""

    outer_lr: float = Field(default=0.7, gt=0)
    """The learning rate of the mean change, when the ranks of "local" meet."""

    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """The momentum of the mean changes."""

    warm_up: int = Field(default=10, ge=2)
    """How many first steps "powersgd" and "thresholded" leave dense, and "delayed" punctual."""

    @model_validator(mode="after")
    def _check_recut(self) -> Self:
        if not self.recut_every:
            return self
        if self.kind != "pipelined":
            raise ValueError(
                f"recut_every={self.recut_every} is for kind='pipelined', not for {self.kind!r}; "
                "leave it out"
            )
        if self.tp > 1 or self.fully_shard:
            raise ValueError(
                f"recut_every={self.recut_every} moves whole layers between ranks, and with tp > 1 "
                "or fully_shard=true ranks have parts of them; leave it out"
            )
        return self

    def check_calibration(self, key: str, calibration: str) -> None:
        """Raise `ValueError` if the dense part is planned for machines that nobody knows.

        Args:
            key: of the section that this one is in.
            calibration: of the machines; empty for none.
        """
        if self.kind == "planned" and not calibration:
            raise ValueError(
                f'{key}.dense.kind="planned" needs to know the machines; give a calibration'
            )

    @property
    def is_stock(self) -> bool:
        """Whether torch and TorchRec have all that it takes."""
        return self.kind in ("ddp", "fp16", "powersgd")

    @property
    def is_other_algorithm(self) -> bool:
        """Whether it trains something else than DDP, more than rounding."""
        return self.kind in ("powersgd", "thresholded", "delayed", "local")

    @property
    def text(self) -> str:
        """The difference from DDP, in words; empty if there is none."""
        return {
            "ddp": "",
            "fp16": "dense gradients in fp16",
            "powersgd": f"dense gradients by PowerSGD of rank {self.rank}",
            "delayed": "dense gradients one step late",
            "fully_sharded": f"dense part fully sharded, in {self.num_copies} copies",
            "tensor_parallel": f"layers split over {self.tp} ranks, in {self.num_copies} copies",
            "pipelined": self._pipelined_text,
            "planned": "dense part by predicted cost",
            "local": f"dense parts that meet every {self.local_steps} steps",
            "thresholded": f"{self.density:.3%} of dense gradients, in {self.values.value}",
        }[self.kind]

    @property
    def _pipelined_text(self) -> str:
        sharded = ", sharded" if self.fully_shard else ""
        split = f", layers split over {self.tp} ranks" if self.tp > 1 else ""
        return (
            f"{self.num_stages} stages, {self.schedule}, {self.num_micro_batches} micro-batches, "
            f"{self.layout.value}{sharded}{split}"
        )

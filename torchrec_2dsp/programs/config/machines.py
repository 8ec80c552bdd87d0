"""`MachinesConfig`: machines that needn't be present, as a calibration and changes to it."""

from typing import Self

from pydantic import Field, model_validator

from torchrec_2dsp.cost.calibration import Calibration, KernelCost
from torchrec_2dsp.cost.collectives import CollectiveCost
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.config_file import CalibrationPath
from torchrec_2dsp.programs.config.section import Section


class Slower(Section):
    """Factors by which durations exceed a calibration's; below 1 they are shorter.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec_2dsp.programs.config.machines import Slower
        >>> calibration = tdsp.Calibration.load("configs/hardware/h100_8_datasheet.toml")
        >>> other = Slower(link=4.0).than(calibration)
        >>> other.collectives.all_reduce.link_s_per_byte
        1e-11
        >>> other.hardware.name
        'h100_8_datasheet with link x 4'
    """

    link: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor for a byte on its way to another host."""

    host: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor for a byte on its way inside a host."""

    latency: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor for times without bytes: starts, other ranks, and turns."""

    kernels: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor for a row that is looked up, sorted, copied, added or updated."""

    def than(self, calibration: Calibration) -> Calibration:
        """Return the calibration of such machines, with the changes in its name."""
        factors = {name: value for name, value in self.model_dump().items() if value != 1.0}
        if not factors:
            return calibration
        changes = ", ".join(f"{name} x {value:g}" for name, value in factors.items())
        hardware = calibration.hardware
        name = f"{hardware.name} with {changes}"
        collectives, kernels = calibration.collectives, calibration.kernels
        return calibration.model_copy(
            update={
                "hardware": hardware.model_copy(update={"name": name}),
                "collectives": collectives.model_copy(
                    update={what: self._collective(cost) for what, cost in collectives if cost}
                ),
                "kernels": kernels.model_copy(
                    update={what: self._kernel(cost) for what, cost in kernels if cost}
                ),
                "turn_s": calibration.turn_s * self.latency,
            }
        )

    def _collective(self, cost: CollectiveCost) -> CollectiveCost:
        return cost.model_copy(
            update={
                "base_s": cost.base_s * self.latency,
                "per_peer_s": cost.per_peer_s * self.latency,
                "local_s_per_byte": _times(cost.local_s_per_byte, self.host),
                "link_s_per_byte": _times(cost.link_s_per_byte, self.link),
            }
        )

    def _kernel(self, cost: KernelCost) -> KernelCost:
        per_unit = (name for name in type(cost).model_fields if name.startswith("per_"))
        slower = {name: getattr(cost, name) * self.kernels for name in per_unit}
        return cost.model_copy(update={"base_s": cost.base_s * self.latency} | slower)


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor


_GIB = 2**30


class MachinesConfig(Section):
    """The machines to train a model on."""

    calibration: CalibrationPath
    """A file from the calibrate command, relative to the config file, or the name of one that
    ships, such as `emulated_1gbit`."""

    slower: Slower = Slower()
    """The factors by which durations exceed the calibration's."""

    num_ranks: int = Field(default=4, ge=1)
    """Ranks in the world."""

    ranks_per_host: int = Field(default=2, ge=1)
    """Ranks that share a host's link."""

    memory_gib: float = Field(default=0.0, ge=0)
    """A rank's memory in GiB; 0 takes the calibration's."""

    host_memory_gib: float = Field(default=0.0, ge=0)
    """A rank's share of its host's memory in GiB, besides a GPU's; 0 takes the calibration's."""

    reserved: float = Field(default=0.15, ge=0, lt=1)
    """The share of memory to keep from tables and their exchanges."""

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        ranks, per_host = self.num_ranks, self.ranks_per_host
        if ranks > per_host and ranks % per_host:
            below = ranks - ranks % per_host
            raise ValueError(
                f"num_ranks={ranks} is no multiple of ranks_per_host={per_host}, and all hosts "
                f"have as many ranks; use num_ranks={below} or {below + per_host}, or another "
                "ranks_per_host"
            )
        return self

    @property
    def local_size(self) -> int:
        """Ranks on the first host."""
        return min(self.ranks_per_host, self.num_ranks)

    def calibrated(self) -> Calibration:
        """Return these machines' calibration, with their memory.

        Raises:
            ConfigError: the memory isn't given, or CPUs are given a second memory.
        """
        calibration = self.slower.than(Calibration.load(self.calibration))
        calibration.check_covers(world_size=self.num_ranks, local_world_size=self.ranks_per_host)
        num_bytes = int(self.memory_gib * _GIB) or calibration.hardware.memory_bytes
        if not num_bytes:
            raise ConfigError(
                f"{self.calibration} doesn't say how much memory a rank has; set "
                "machines.memory_gib"
            )
        if self.host_memory_gib and calibration.hardware.device == "cpu":
            raise ConfigError(
                f"machines.host_memory_gib={self.host_memory_gib} is for GPUs, and "
                f"{self.calibration} is of CPUs, which have one memory; set machines.memory_gib"
            )
        in_host = int(self.host_memory_gib * _GIB) or calibration.hardware.host_memory_bytes
        sizes = {"memory_bytes": num_bytes, "host_memory_bytes": in_host}
        hardware = calibration.hardware.model_copy(update=sizes)
        return calibration.model_copy(update={"hardware": hardware})

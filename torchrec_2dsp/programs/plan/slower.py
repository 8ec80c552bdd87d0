"""`Slower`: what if the network or the machines were other than they were measured?"""

from pydantic import BaseModel, ConfigDict, Field

from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.coefficients import CollectiveCost, KernelCost


class Slower(BaseModel):
    """How many times as long things take as in a calibration; below 1 they are quicker.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec_2dsp.programs.plan.slower import Slower
        >>> calibration = tdsp.Calibration.load("configs/hardware/h100_8_datasheet.toml")
        >>> other = Slower(link=4.0).than(calibration)
        >>> other.collectives.all_reduce.link_s_per_byte
        1e-11
        >>> other.hardware.name
        'h100_8_datasheet with link x 4'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    link: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor of a byte on its way to another host."""

    host: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor of a byte on its way inside a host."""

    latency: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor of what takes time whatever the bytes: starts, other ranks, and turns."""

    kernels: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor of a row that is looked up, sorted, copied, added or updated."""

    def than(self, calibration: Calibration) -> Calibration:
        """A calibration of such machines, whose name says so."""
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

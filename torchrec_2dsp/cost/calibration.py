"""`Calibration`: a TOML file with some machines' times for collectives and row work."""

import os
import platform
import tomllib
from pathlib import Path
from typing import Any, Self

import tomli_w
import torch
from pydantic import Field, ValidationError
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    Topology,
    TopologyFactory,
    TrainerConfig,
)

from torchrec_2dsp._version import SHIPPED_CONFIGS
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.collectives import CalibrationPart, Call, Coefficients, CollectiveCost, Unit
from torchrec_2dsp.errors import CalibrationError, ConfigError

CALIBRATION_FORMAT = 3

_SHIPPED = SHIPPED_CONFIGS / "hardware"

_PASSES = {
    Transport.FP32: 0.0,
    Transport.BF16: 1.5,
    Transport.FP16: 1.5,
    Transport.INT8: 5.0,
    Transport.INT4: 9.0,
}
"""Encoding and decoding in units of copying the rows, for CPUs where they weren't measured."""


class KernelCost(Coefficients):
    """Seconds of work on a rank's rows, while the other ranks do the same work."""

    per_item_s: Unit
    """Seconds per id or row."""

    per_byte_s: Unit
    """Seconds per byte of rows."""

    def seconds(self, items: Any, num_bytes: Any) -> Any:
        """Return the work's seconds without the constant per call, for numbers or arrays."""
        return self.per_item_s * items + self.per_byte_s * num_bytes


class BagCost(KernelCost):
    """Seconds of pooling bags, by their ids, output vectors and distinct rows.

    Repeated ids read cached rows, so a row's first id costs more than the others.
    """

    per_vector_byte_s: Unit
    """Seconds per byte of the bags' vectors."""

    per_row_byte_s: Unit
    """Seconds per byte of the distinct rows."""

    def of_bags(self, items: Any, num_bytes: Any, *, vector_bytes: Any, row_bytes: Any) -> Any:
        """Return the bags' seconds without the constant per call, for numbers or arrays.

        ``num_bytes`` count a row for each id, ``row_bytes`` only once.
        """
        bags = self.per_vector_byte_s * vector_bytes + self.per_row_byte_s * row_bytes
        return self.seconds(items, num_bytes) + bags


class Kernels(CalibrationPart):
    """The times for work on a rank's rows, while its neighbours do the same work."""

    lookup: BagCost
    """The forward of a fused embedding kernel that sums bags."""

    update: BagCost
    """That kernel's backward, with the optimizer."""

    row_lookup: KernelCost
    """The forward of row exchange's kernel, which returns rows unpooled."""

    row_update: KernelCost
    """Applying row gradients, after summing them by row."""

    find: KernelCost
    """Finding distinct ids, and each id's row among them."""

    pool: KernelCost
    """Copying rows to their places, or summing them there."""

    add: KernelCost
    """Summing each row's gradients."""

    dense_update: KernelCost
    """An optimizer's pass over a whole table."""

    host_memory: KernelCost | None = None
    """A GPU's reads of rows in host memory, in addition to the kernels' times above;
    `None` on CPUs, and if it wasn't measured."""

    matmul: KernelCost | None = None
    """Multiplying matrices, by floating-point operations and by input and output bytes;
    `None` in files from before it was measured."""

    encode_bf16: KernelCost | None = None
    """Encoding and decoding rows in bf16; like the next ones, `None` in files from before it was
    measured."""

    encode_fp16: KernelCost | None = None
    """Encoding and decoding rows in fp16."""

    encode_int8: KernelCost | None = None
    """Encoding and decoding rows in 8 bits."""

    encode_int4: KernelCost | None = None
    """Encoding and decoding rows in 4 bits."""

    def codec(self, transport: Transport) -> KernelCost:
        """Return the cost of encoding and decoding rows, by float32 bytes counted once."""
        measured = getattr(self, encoding(transport), None)
        if measured is not None:
            return measured
        return KernelCost(
            base_s=0.0, per_item_s=0.0, per_byte_s=_PASSES[transport] * self.pool.per_byte_s
        )


def encoding(transport: Transport) -> str:
    """Return a calibration's name for encoding and decoding rows."""
    return f"encode_{transport.value}"


class Hardware(CalibrationPart):
    """The machines for which a calibration holds."""

    name: str
    """The machines' name."""

    device: str = Field(pattern="^(cpu|cuda)$")
    """The tables' device: ``cpu`` or ``cuda``."""

    num_hosts: int = Field(ge=1, le=2**20)
    """The number of hosts that took part."""

    ranks_per_host: int = Field(ge=1, le=2**12)
    """The number of ranks that shared a host's cores and link."""

    processor: str = ""
    """A host's processor, or the name of its GPUs."""

    measured: str = ""
    """The day of the measurement; or the data sheets, if nothing was measured."""

    memory_bytes: int = Field(default=0, ge=0, le=2**50)
    """A rank's memory for tables: GPU memory, or its share of a host's; 0 if unknown."""

    host_memory_bytes: int = Field(default=0, ge=0, le=2**50)
    """A rank's share of its host's memory, in addition to GPU memory; 0 if unknown, and on CPUs."""


class CollectiveTimes(CalibrationPart):
    """The costs of the collectives."""

    all_to_all: CollectiveCost
    """The backend's own all-to-all."""

    full_duplex_all_to_all: CollectiveCost | None = None
    """This package's all-to-all on gloo; on nccl the backend's is used."""

    all_reduce: CollectiveCost
    """The all-reduce of dense gradients, and of whole shards."""

    all_gather: CollectiveCost
    """The backward of row-wise sharding."""

    reduce_scatter: CollectiveCost
    """The forward of row-wise sharding."""


class Calibration(CalibrationPart):
    """A network's and its machines' constants, from which a `CostModel` predicts a step.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> calibration = tdsp.Calibration.load("emulated_1gbit")
        >>> calibration.hardware.num_hosts
        2
    """

    format: int = Field(default=CALIBRATION_FORMAT, ge=CALIBRATION_FORMAT, le=CALIBRATION_FORMAT)
    """The file's format."""

    hardware: Hardware
    """The calibrated machines."""

    collectives: CollectiveTimes
    """The network's costs."""

    kernels: Kernels
    """The machines' costs."""

    turn_s: Call = 0.0
    """The extra time of a collective that follows computing: ranks don't arrive
    together, and if they share cores, sending waits for ranks that still compute."""

    straggler_share: float = Field(default=0.0, ge=0, le=1)
    """The slowest of n ranks computes longer than usual by ``ln(n)`` times this share, as if
    delays had an exponential tail; 0 for calibrations, which waited for all ranks anyway."""

    hidden_share: float = Field(default=1.0, ge=0, le=1)
    """The share of a long exchange that takes no time if ranks compute meanwhile; the rest is the
    processors' own work for it."""

    def save(self, path: str | Path) -> None:
        """Write the calibration as TOML."""
        Path(path).write_text(tomli_w.dumps(self.model_dump(exclude_none=True)))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote, or by its name a calibration that ships with the package.

        Raises:
            CalibrationError: the file can't be read, isn't a calibration, or has absurd numbers.
        """
        shipped = {file.stem: file for file in _SHIPPED.glob("*.toml")}
        try:
            data = tomllib.loads(Path(shipped.get(str(path), path)).read_text())
        except OSError as error:
            raise CalibrationError(
                f"{path} can't be read: {error.strerror}; use a path, or one of "
                f"{', '.join(sorted(shipped))}, which ship with the package"
            ) from error
        # For a number with too many digits Python raises a ValueError.
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{path} is not TOML: {error}") from error
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(str(part) for part in wrong["loc"])
            raise CalibrationError(
                f"{path} is no calibration of format {CALIBRATION_FORMAT}: {where}: "
                f"{wrong['msg']}; make one with the calibrate command"
            ) from error

    @classmethod
    def of_topology(cls, topology: Topology) -> Self:
        """Build a calibration from a TorchRec topology's figures, if nothing was measured.

        It only has bandwidths: no message has a latency, no kernel a start-up time. Each rank has
        its own interface, and reads and writes a row once per pass.
        """
        on_cpu = topology.compute_device == "cpu"
        memory = topology.ddr_mem_bw if on_cpu else topology.hbm_mem_bw
        across = min(topology.intra_host_bw, topology.inter_host_bw)
        if min(memory, topology.hbm_to_ddr_mem_bw, across) <= 0:
            raise ConfigError(
                "a Topology with a bandwidth of 0 moves nothing; give bytes per ms, of which "
                "float('inf') is one"
            )
        wire = CollectiveCost(
            base_s=0.0,
            per_peer_s=0.0,
            local_s_per_byte=1 / (1e3 * topology.intra_host_bw),
            link_s_per_byte=1 / (1e3 * topology.inter_host_bw * topology.local_world_size),
        )
        once, twice, bus = (
            KernelCost(base_s=0.0, per_item_s=0.0, per_byte_s=passes / (1e3 * bandwidth))
            for passes, bandwidth in ((1, memory), (2, memory), (1, topology.hbm_to_ddr_mem_bw))
        )
        # Repeated ids cost the same as others.
        lookup, update = (
            BagCost(**cost.model_dump(), per_vector_byte_s=0.0, per_row_byte_s=0.0)
            for cost in (once, twice)
        )
        return cls(
            hardware=Hardware(
                name="topology",
                device="cpu" if on_cpu else "cuda",
                num_hosts=-(-topology.world_size // topology.local_world_size),
                ranks_per_host=topology.local_world_size,
                measured="never: the figures of a Topology",
            ),
            collectives=CollectiveTimes(
                all_to_all=wire, all_reduce=wire, all_gather=wire, reduce_scatter=wire
            ),
            kernels=Kernels(
                lookup=lookup,
                update=update,
                row_lookup=twice,
                row_update=twice,
                find=once,
                pool=twice,
                add=twice,
                dense_update=once,
                host_memory=None if on_cpu else bus,
            ),
        )

    def all_to_all(self, *, full_duplex: bool) -> CollectiveCost:
        """Return this package's all-to-all if ``full_duplex`` and measured, else the backend's."""
        other = self.collectives.full_duplex_all_to_all
        return other if full_duplex and other is not None else self.collectives.all_to_all

    def topology(
        self, world_size: int, local_world_size: int, *, device: str = "", **more: Any
    ) -> Topology:
        """Build a topology for TorchRec's planner: all-to-all bandwidths, as TorchRec counts them.

        A rank's memory is the calibration's, if known, for the same kind of device.

        Args:
            world_size: ranks to plan for.
            local_world_size: ranks per host.
            device: "cpu" or "cuda", by default the calibration's.
            more: arguments of TorchRec's `TrainerConfig`.

        Example:
            >>> import torchrec_2dsp as tdsp
            >>> calibration = tdsp.Calibration.load("emulated_1gbit")
            >>> topology = calibration.topology(world_size=4, local_world_size=2)
            >>> topology.inter_host_bw < topology.intra_host_bw
            True
        """
        cost = self.all_to_all(full_duplex=True)
        device = device or self.hardware.device
        sizes = {"ddr_cap_bytes": self.hardware.host_memory_bytes}
        sizes["ddr_cap_bytes" if device == "cpu" else "hbm_cap_bytes"] = self.hardware.memory_bytes
        if device == self.hardware.device:
            more = {name: size for name, size in sizes.items() if size} | more
        return TopologyFactory.create_topology(
            TrainerConfig(world_size=world_size, local_world_size=local_world_size, **more),
            HardwareConfig(
                intra_host_bw=_per_ms(cost.local_s_per_byte),
                # A rank has its share of the host's link.
                inter_host_bw=_per_ms(cost.link_s_per_byte, shared_by=local_world_size),
            ),
            # Without ``use_hardware_based_bandwidth``, TorchRec drops the bandwidths.
            KernelConfig(compute_device=device, use_hardware_based_bandwidth=True),
        )

    def check_covers(self, *, world_size: int, local_world_size: int) -> None:
        """Raise `CalibrationError` if bytes would travel where none did during calibration."""
        cost = self.collectives.all_to_all
        for is_there, s_per_byte, where in (
            (local_world_size > 1, cost.local_s_per_byte, "in a host"),
            (world_size > local_world_size, cost.link_s_per_byte, "across hosts"),
        ):
            if is_there and s_per_byte is None:
                raise CalibrationError(
                    f"{self.hardware.name} was calibrated where nothing travels {where}, and here "
                    f"are {world_size} ranks, {local_world_size} per host; calibrate on hosts like "
                    "these"
                )

    def differences(self, *, local_world_size: int, device: str, processor: str = "") -> list[str]:
        """List the differences from the calibrated machines, in words.

        Args:
            local_world_size: ranks on each host.
            device: ``"cpu"`` or ``"cuda"``.
            processor: a rank's, by `processor_name`; empty if the machines aren't present.
        """
        calibrated, texts = self.hardware, []
        if local_world_size != calibrated.ranks_per_host:
            texts.append(
                f"ranks per host: {local_world_size}, and {calibrated.ranks_per_host} when measured"
            )
        if device != calibrated.device:
            texts.append(f"tables are on {device}, and were on {calibrated.device}")
        elif (
            processor
            and calibrated.processor
            and processor not in calibrated.processor.split(" and ")
        ):
            texts.append(f"the processor is {processor}, and was {calibrated.processor}")
        return texts


def processor_name(device: torch.device) -> str:
    """Return the name of this rank's GPU, empty if it has none, or of its host's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def _per_ms(s_per_byte: float | None, shared_by: int = 1) -> float | None:
    return None if not s_per_byte else 1e-3 / s_per_byte / shared_by

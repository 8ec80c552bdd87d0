"""`Link`: how fast the connection of a host is, and the `tc` commands that make it so."""

import math
import re
from dataclasses import dataclass

from torchrec_2dsp.programs.cluster.errors import ClusterConfigError

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_UNLIMITED = ("none", "unlimited")

_QUEUE_S = 0.010
_MIN_QUEUE_BYTES, _MAX_QUEUE_BYTES = 256 * 1024, 4 * 1024**2
_BURST_S = 0.001
_MIN_BURST_BYTES = 128 * 1024
_DELAY_QUEUE_PACKETS = 100_000


@dataclass(frozen=True)
class Link:
    """The rate of one host's connection, the same in both directions at once, and its delay."""

    bits_per_s: int | None
    """None: as fast as the machine can."""

    delay_ms: float = 0.0
    """One way, added to what leaves a host."""

    @classmethod
    def parse(cls, rate: str, delay_ms: float = 0.0) -> "Link":
        """The link that a text like "200mbit", "1gbit" or "none" describes.

        Example:
            >>> from torchrec_2dsp.programs.cluster.link import Link
            >>> Link.parse("2.5gbit").bits_per_s
            2500000000
        """
        if not (math.isfinite(delay_ms) and delay_ms >= 0):
            raise ClusterConfigError(f"delay_ms={delay_ms} is not a time; use 0 or more")
        if rate in _UNLIMITED:
            return cls(None, delay_ms)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
        bits_per_s = round(float(match[1]) * _UNITS[match[2]]) if match else 0
        if not bits_per_s:
            raise ClusterConfigError(
                f"link={rate!r} is not a rate; use for instance '200mbit', '1gbit' or 'none'"
            )
        return cls(bits_per_s, delay_ms)

    @property
    def rate(self) -> str:
        """The rate as `parse` reads it.

        Example:
            >>> from torchrec_2dsp.programs.cluster.link import Link
            >>> Link.parse("2.5gbit").rate
            '2500mbit'
        """
        return "none" if self.bits_per_s is None else f"{self.bits_per_s / 10**6:g}mbit"

    @property
    def bytes_per_s(self) -> float | None:
        """None: as fast as the machine can."""
        return None if self.bits_per_s is None else self.bits_per_s / 8

    @property
    def queue_bytes(self) -> int:
        """Bytes that may wait for the link: about 10 ms of it. TCP oscillates with more or less."""
        num_bytes = round((self.bytes_per_s or 0) * _QUEUE_S)
        return min(max(num_bytes, _MIN_QUEUE_BYTES), _MAX_QUEUE_BYTES)

    @property
    def burst_bytes(self) -> int:
        """Bytes that may pass at once: more than one offloaded packet (64 KiB), and what a late
        timer on a busy machine would lose (1 ms)."""
        return max(round((self.bytes_per_s or 0) * _BURST_S), _MIN_BURST_BYTES)

    def limit_commands(self, device: str, *, delayed: bool) -> list[str]:
        """The `tc` commands that limit what leaves ``device``, and delay it if asked to.

        Each end of a connection limits one direction, but only one of the two may delay.
        """
        commands = []
        where = "root handle 1:"
        if delayed and self.delay_ms:
            queue = f"netem delay {round(self.delay_ms * 1000)}us limit {_DELAY_QUEUE_PACKETS}"
            commands.append(f"qdisc add dev {device} {where} {queue}")
            where = "parent 1:1 handle 10:"
        if self.bits_per_s is not None:
            queue = f"tbf rate {self.bits_per_s}bit burst {self.burst_bytes} limit "
            commands.append(f"qdisc add dev {device} {where} {queue}{self.queue_bytes}")
        return commands

    def __str__(self) -> str:
        if self.bits_per_s is None:
            return "no limit"
        if self.bits_per_s >= 10**9:
            return f"{self.bits_per_s / 1e9:g} Gbit/s"
        return f"{self.bits_per_s / 1e6:g} Mbit/s"

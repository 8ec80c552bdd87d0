"""All errors that this package raises on purpose.

Each one is a `TwoDError` and also the built-in error that a caller would expect
(`ValueError` for a bad argument, `RuntimeError` for a failed sync), so that both
``except tdsp.TwoDError`` and idiomatic Python work. Messages name the value, the rule
and the remedy.
"""

from collections.abc import Iterable


class TwoDError(Exception):
    """Base of all errors of this package."""

    is_on_all_ranks = False
    """True if the ranks have agreed on the error, so that none needs to be told."""


class VersionError(TwoDError, ImportError):
    """The installed torch, torchrec and fbgemm versions don't belong together."""


class UntriedVersionWarning(UserWarning):
    """The installed torch, torchrec or fbgemm version isn't among the tested ones."""


class MeshError(TwoDError, ValueError):
    """A mesh that doesn't fit the world."""


class PlanError(TwoDError, ValueError):
    """A sharding plan that can't be made, or can't be run on this mesh."""


class ConfigError(TwoDError, ValueError):
    """Arguments that contradict each other, or that differ between ranks."""


class CalibrationError(TwoDError, ValueError):
    """A calibration that can't be made, read or used, because it lacks something or doesn't fit."""


class UnsupportedError(TwoDError, NotImplementedError):
    """A TorchRec feature that this package refuses by name instead of getting it wrong."""


class CheckpointError(TwoDError, RuntimeError):
    """A checkpoint that can't be written, read, or doesn't fit the model."""


class OutputError(TwoDError, OSError):
    """A program's output file that can't be written, such as on a full disk."""


class ExportError(TwoDError, RuntimeError):
    """A model that isn't exported because it would serve other scores than it was trained for."""


class InputError(TwoDError, IndexError):
    """A batch with out-of-range ids or wrong sizes, or a log with unreadable rows."""


class SyncError(TwoDError, RuntimeError):
    """Replicas couldn't be made equal."""


class NotFiniteError(SyncError):
    """A gradient, a weight or optimizer state that is NaN or infinite.

    No rank has applied the update or average. A checkpoint load drops it, and training goes on.
    """


class RankError(SyncError):
    """A rank failed, doesn't respond, or calls something else than the other ranks.

    The other ranks raise it, each in the call where it noticed. What the step has exchanged so far
    can't be used, so every later use of the model raises it again.

    Example:
        >>> from torchrec_2dsp.errors import RankError
        >>> RankError("rank 1 failed at step 3, in the loader: OSError: no such file", (1,)).ranks
        (1,)
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        """The ranks at fault, as far as they are known; empty if all ranks do the same."""


def check_choice(
    name: str,
    value: object,
    choices: Iterable[object],
    *,
    owner: str = "",
    error: type[TwoDError] = ConfigError,
) -> None:
    """Raise an error unless a value is among the choices, which are values or an enum.

    Example:
        >>> from torchrec_2dsp.errors import check_choice
        >>> check_choice("kind", "cubic", ("linear", "square"), owner="Curve")
        Traceback (most recent call last):
        ...
        torchrec_2dsp.errors.ConfigError: Curve(kind='cubic') is unknown; use one of ...
    """
    known = [getattr(choice, "value", choice) for choice in choices]
    if getattr(value, "value", value) not in known:
        argument = _argument(owner, name, value)
        raise error(f"{argument} is unknown; use one of {', '.join(map(repr, known))}")


def check_count(name: str, value: object, least: int = 1, *, owner: str = "") -> None:
    """Raise an error unless a value is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{_argument(owner, name, value)} is no count; use {least} or more")


def _argument(owner: str, name: str, value: object) -> str:
    return f"{owner}({name}={value!r})" if owner else f"{name}={value!r}"

"""The errors of an emulated cluster. Messages name the value, the rule and the remedy."""


class ClusterError(RuntimeError):
    """An emulated cluster that can't be made, or can't do what was asked of it."""


class ClusterConfigError(ClusterError, ValueError):
    """Arguments that no cluster can have."""


class CommandFailed(ClusterError):
    """A host ended with an error or missed the deadline. The message shows every host's output."""

    def __init__(
        self, summary: str, exit_codes: tuple[int | None, ...], tails: tuple[str, ...]
    ) -> None:
        self.exit_codes = exit_codes
        """The exit code of each host; None for a host that was stopped while it ran."""
        self.tails = tails
        """The end of each host's output."""
        states = ["stopped" if code is None else f"exit code {code}" for code in exit_codes]
        parts = [
            f"==== host {host} ({state})\n{tail.rstrip()}"
            for host, (state, tail) in enumerate(zip(states, tails, strict=True))
        ]
        super().__init__("\n".join([summary, *parts]))


class SelfCheckFailed(ClusterError):
    """The network isn't as fast, or not as slow, as it was set to be."""

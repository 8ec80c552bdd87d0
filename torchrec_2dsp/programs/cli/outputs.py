"""The files that commands write."""

from pathlib import Path

from torchrec_2dsp.errors import ConfigError


def check_writable(output: Path | None) -> None:
    """Raise `ConfigError` if ``output`` can't be written: before the work, not after it."""
    if output is None:
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        is_new = not output.exists()
        output.touch()
        if is_new:
            # What fails later leaves no empty file.
            output.unlink()
    except OSError as error:
        raise ConfigError(f"--output {output} can't be written: {error.strerror}") from error

"""The `torchrec-2dsp` command, which is also `python -m torchrec_2dsp`."""

import os
import sys

_NEEDED = ("rich", "typer")


def main() -> None:
    """Run the command line, or tell the user what to install for it."""
    # FBGEMM's import asks whether there is a GPU. Asked otherwise, processes forked later, such as
    # those of `bench`, couldn't use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        from torchrec_2dsp.programs.cli.app import app
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _NEEDED:
            raise
        sys.exit(
            f"error: the command line needs {library}, which is not installed; "
            "pip install 'torchrec-2dsp[cli]'"
        )
    app()


if __name__ == "__main__":
    main()

"""`python -m torchrec_2dsp`."""

from torchrec_2dsp.programs.cli.app import main

if __name__ == "__main__":
    main()

"""`python -m torchrec_2dsp`."""

from torchrec_2dsp.cli.app import main

if __name__ == "__main__":
    main()

"""Loads many damaged checkpoints: ``python -m tests.support.damage --damages 500 --seed 1``."""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.support.damaged_checkpoints import load_damaged, summary
from tests.support.ranks import run_ranks

_DAMAGES_PER_START = 100


def main() -> int:
    """Print what came of all damages; 1 if a load went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kinds: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for start in range(0, arguments.damages, _DAMAGES_PER_START):
        num_damages = min(_DAMAGES_PER_START, arguments.damages - start)
        with tempfile.TemporaryDirectory() as folder:
            seed = arguments.seed * 1_000_000 + start
            by_rank = run_ranks(load_damaged, 2, Path(folder), num_damages, seed, timeout_s=1800)
        _, found_wrong = summary(by_rank)
        wrong += [f"seed {seed}, {text}" for text in found_wrong]
        for outcome in by_rank[0]:
            kinds.setdefault(outcome.damage.split(":")[0], Counter())[outcome.result] += 1
    for kind, counts in sorted(kinds.items()):
        print(f"{kind:20} {dict(sorted(counts.items()))}")
    print("\n".join([f"{len(wrong)} of {arguments.damages} loads went wrong", *wrong]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

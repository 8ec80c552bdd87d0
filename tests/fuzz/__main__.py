"""``python -m tests.fuzz``: run random cases, or one given case."""

import argparse
import random
import sys
from contextlib import ExitStack

from tests.fuzz.case import Case
from tests.fuzz.machine import DEADLINE_S, Machine
from tests.fuzz.worker import Worker


def main() -> int:
    """Run the cases; return 1 for a finding, or if the machine compared too little."""
    arguments = _parsed()
    if arguments.case:
        with Worker() as worker:
            verdict = worker.judged(Case.from_json(arguments.case), arguments.deadline)
        print(verdict.outcome, verdict.kind)
        print(verdict.text or verdict.counts)
        return int(verdict.outcome == "finding")
    seed = random.randrange(10**9) if arguments.seed is None else arguments.seed
    print(f"seed {seed}")
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(arguments.jobs)]
        machine = Machine(workers, deadline_s=arguments.deadline, show=print)
        summary = machine.run(
            seed,
            arguments.cases,
            arguments.seconds,
            is_wanted=lambda case: (
                (not arguments.searched or case.search is not None)
                and (not arguments.id_maps or case.has_maps)
                and (not arguments.positions or case.has_positions)
            ),
        )
    print(summary)
    return int(bool(summary.findings or summary.complaints))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--case", help="run this one, a line of JSON")
    parser.add_argument("--seed", type=int, help="of the first case; a fresh one by default")
    parser.add_argument("--cases", type=int, help="how many")
    parser.add_argument("--seconds", type=float, help="begin no more after so long")
    parser.add_argument(
        "--searched", action="store_true", help="run only those whose plan `parallelize` makes"
    )
    parser.add_argument("--id-maps", action="store_true", help="run only those with id maps")
    parser.add_argument(
        "--positions", action="store_true", help="run only those with position weights"
    )
    parser.add_argument("--jobs", type=int, default=2, help="cases side by side")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="of a case, in seconds")
    arguments = parser.parse_args()
    if not arguments.case and arguments.cases is None and arguments.seconds is None:
        arguments.cases = 100
    return arguments


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())

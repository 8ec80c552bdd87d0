"""Compile Triton's kernels for GPUs, without one: ``python -m tests.support.compiled_kernels``.

The interpreter, by which tests run kernels on a CPU, takes more than the compiler does.
"""

import inspect
import itertools
import os
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # Before Triton is imported.

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchrec_2dsp.codecs import gpu_kernels as codecs
from torchrec_2dsp.rows import gpu_kernels as rows

Launch = tuple[Any, dict[str, str], dict[str, Any]]
"""A kernel, the types of its arguments, and its constants."""
CAPABILITIES = (80, 90)
"""Of an A100 and an H100."""
UPDATE = dict.fromkeys(("first_keys", "weight_starts", "state_starts"), "*i64")
UPDATE |= {"grads": "*fp32", "states": "*fp32", "num_rows": "i32", "lr": "fp32", "eps": "fp32"}
SUM = {"values": "*fp32", "places": "*i64", "offsets": "*i64", "weights": "*fp32"}
SUM |= {"sums": "*fp32", "is_finite": "*i32", "num_bags": "i32"}
CODED = {"rows": "*fp32", "encoded": "*i8", "num_rows": "i32"}


def launches() -> Iterator[Launch]:
    """Yield every kernel with each kind of arguments."""
    for keys, weights, state in itertools.product(("*i32", "*i64"), ("*fp32", "*fp16"), (0, 1, 96)):
        shape = {"DIM": 96, "ROWS": 8, "COLUMNS": 128}
        types = UPDATE | {"keys": keys, "weights": weights}
        yield rows._update, types, {**shape, "STATE": state, "RUNS": 4, "UNIT": 4}
    for is_weighted in (False, True):
        yield rows._sum, SUM, {"DIM": 96, "IS_WEIGHTED": is_weighted, "BAGS": 8, "COLUMNS": 128}
    for bits in (8, 4):
        shape = {"DIM": 96, "STRIDE": 96 * bits // 8 + 2, "BITS": bits, "ROWS": 8, "COLUMNS": 128}
        yield codecs._encode, {**CODED, "unit": "fp32"}, shape
        yield codecs._decode, CODED, shape


def main() -> None:
    """Compile all, and print how many."""
    number = 0
    for (kernel, types, constants), capability in itertools.product(launches(), CAPABILITIES):
        names = list(inspect.signature(kernel.fn).parameters)
        source = ASTSource(
            fn=kernel,
            signature={name: "constexpr" if name in constants else types[name] for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
        )
        compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]
        number += 1
    print(f"{number} kernels compiled")


if __name__ == "__main__":
    main()

"""Compile Triton kernels for GPUs, without one: ``python -m tests.support.compiled_kernels``.

Triton's interpreter, which tests use on CPUs, accepts more code than the compiler does.
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
ALIGNED = [["tt.divisibility", 16]]
"""The alignment that a launch reports for tensors; without it, other code is compiled."""
DIMS = (4, 8, 16, 32, 96, 600)
H100 = GPUTarget("cuda", 90, 32)
UPDATE = dict.fromkeys(("first_keys", "weight_starts", "state_starts"), "*i64")
UPDATE |= {"grads": "*fp32", "states": "*fp32", "num_rows": "i32", "lr": "fp32", "eps": "fp32"}
CODED = {"rows": "*fp32", "encoded": "*i8", "num_rows": "i32"}


def launches() -> Iterator[Launch]:
    """Yield every kernel with all argument types, for narrow and wide rows."""
    for dim in DIMS:
        columns = triton.next_power_of_2(dim)
        shape = {"DIM": dim, "ROWS": max(1024 // columns, 1), "COLUMNS": columns}
        for weights, state in itertools.product(("*fp32", "*fp16"), (0, 1, dim)):
            types = UPDATE | {"keys": "*i64" if state else "*i32", "weights": weights}
            yield rows._update, types, {**shape, "STATE": state, "RUNS": 4, "UNIT": 4}
        for bits in (8, 4):
            coded = {**shape, "STRIDE": dim * bits // 8 + 2, "BITS": bits}
            yield codecs._encode, {**CODED, "unit": "fp32"}, coded
            yield codecs._decode, CODED, coded


def main() -> None:
    """Compile all, and print how many."""
    number = 0
    for kernel, types, constants in launches():
        names = list(inspect.signature(kernel.fn).parameters)
        source = ASTSource(
            fn=kernel,
            signature={name: "constexpr" if name in constants else types[name] for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): ALIGNED for name in types if types[name].startswith("*")},
        )
        compiled: Any = triton.compile(source, target=H100)
        assert compiled.asm["cubin"]
        number += 1
    print(f"{number} kernels compiled")


if __name__ == "__main__":
    main()

"""Serve a request with a model that `torchrec-2dsp export` wrote, without this package.

torchrec-2dsp export out --only exact --output served
python docs/examples/serve.py served
"""

import json
import sys
from pathlib import Path

import fbgemm_gpu  # noqa: F401  It has the operators that the model calls.
import torch


def main() -> None:
    folder = Path(sys.argv[1])
    model = torch.jit.load(folder / "model.pt")
    inputs = json.loads((folder / "features.json").read_text())
    num_features, num_samples = len(inputs["features"]), 2

    # Two samples. The first one has id 1 of each feature, and the second one no ids at all. Ids go
    # feature by feature, and within a feature sample by sample.
    dense = torch.zeros(num_samples, inputs["num_dense"])
    lengths = torch.tensor([1, 0] * num_features)
    values = torch.ones(num_features, dtype=torch.int64)

    with torch.inference_mode():
        answer = model(dense, values, lengths)
    for name in inputs["outputs"]:
        print(name, tuple(answer[name].shape), answer[name].flatten()[:4].tolist())
    print("done")


if __name__ == "__main__":
    main()

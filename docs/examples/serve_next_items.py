"""Predict next items with a sequence model that `torchrec-2dsp export` wrote, without this package.

torchrec-2dsp export runs/sequences --output served
python docs/examples/serve_next_items.py served
"""

import json
import sys
from pathlib import Path

import fbgemm_gpu  # noqa: F401  It has the operators that the model calls.
import torch

NUM_NEXT = 3


def main() -> None:
    folder = Path(sys.argv[1])
    model = torch.jit.load(folder / "model.pt")
    inputs = json.loads((folder / "features.json").read_text())
    num_items = inputs["features"][0]["num_rows"]

    # Two histories, oldest item first: items 1, 0 and 1 again, and item 0 alone.
    values, lengths = torch.tensor([1, 0, 1, 0]), torch.tensor([3, 1])
    no_dense = torch.empty(len(lengths), 0)

    with torch.inference_mode():
        answer = model.next_items(no_dense, values, lengths, NUM_NEXT, exclude_seen=True)
        vectors = model(no_dense, values, lengths)["next_vectors"]
        # For an index of nearest neighbours, which then takes the place of next_items.
        items = model.item_vectors(torch.arange(num_items))
    for name, ids in zip(("first", "second"), answer["items"].tolist(), strict=True):
        print(f"after the {name} history:", *ids)
    print("vectors", tuple(vectors.shape), "to be multiplied with", tuple(items.shape))
    print("done")


if __name__ == "__main__":
    main()

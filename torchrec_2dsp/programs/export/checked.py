"""`RequestCheck` and `CheckedRequests`: scripts that refuse requests which can't be right."""

from collections.abc import Sequence

import torch
from torch import nn

from torchrec_2dsp.programs.export.served import ServedFeature


class RequestCheck(nn.Module):
    """Refuses requests that FBGEMM would answer with other rows than those that are meant.

    It is written for TorchScript, so errors are `ValueError`s, which a script can raise.
    """

    def __init__(self, features: Sequence[ServedFeature], num_dense: int) -> None:
        """
        Args:
            features: those of a request, in its order.
            num_dense: how many dense features a sample has.
        """
        super().__init__()
        self.num_features, self.num_dense = len(features), num_dense
        self.register_buffer("num_rows", torch.tensor([feature.num_rows for feature in features]))
        self.num_rows: torch.Tensor

    def forward(self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Raise unless the three tensors are a request."""
        num_samples = dense.size(0)
        if num_samples == 0 or dense.dim() != 2 or dense.size(1) != self.num_dense:
            raise ValueError(
                f"dense has the shape {dense.size()}; give a row for each sample, one at least, "
                f"and {self.num_dense} numbers in each row"
            )
        if lengths.dim() != 1 or lengths.numel() != self.num_features * num_samples:
            raise ValueError(
                f"lengths has the shape {lengths.size()}; give {self.num_features * num_samples} "
                f"numbers: one for each of {num_samples} samples, feature by feature"
            )
        if int(lengths.sum()) != values.numel() or bool((lengths < 0).any()):
            raise ValueError(
                f"lengths add up to {int(lengths.sum())}, and there are {values.numel()} values; "
                "give the values of all samples, feature by feature, and no negative length"
            )
        counts = lengths.view(self.num_features, num_samples).sum(dim=1)
        bounds = torch.repeat_interleave(self.num_rows, counts.long())
        if bool(((values < 0) | (values >= bounds)).any()):
            raise ValueError("an id is negative, or its feature has fewer rows; see features.json")


class CheckedRequests(nn.Module):
    """Answers requests that are right."""

    def __init__(self, check: RequestCheck, answers: nn.Module) -> None:
        """
        Args:
            check: raises for those that aren't.
            answers: what is given those that are.
        """
        super().__init__()
        self.check, self.answers = check, answers

    def forward(
        self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The answer to a request."""
        self.check(dense, values, lengths)
        return self.answers(dense, values, lengths)

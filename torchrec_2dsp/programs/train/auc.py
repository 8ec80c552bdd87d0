"""`area_under_roc`: how well scores order clicks before other samples, exactly."""

import math

import torch


def area_under_roc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of pairs of a click and another sample in which the click has the higher score.

    Pairs with equal scores count half. `nan` if there are no pairs, or a score is `nan`.

    Args:
        scores: one number for each sample; any increasing function of them gives the same.
        labels: 1 for a click, 0 for another sample.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.programs.train.auc import area_under_roc
        >>> area_under_roc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        0.875
    """
    if scores.isnan().any():
        return math.nan
    _, places = torch.unique(scores, return_inverse=True)
    num_places = int(places.max()) + 1 if places.numel() else 0
    is_click = labels > 0.5
    clicks = torch.bincount(places[is_click], minlength=num_places)
    others = torch.bincount(places[~is_click], minlength=num_places)
    num_pairs = int(clicks.sum()) * int(others.sum())
    if not num_pairs:
        return math.nan
    others_below = others.cumsum(0) - others
    # Twice the number of pairs in order, in whole numbers.
    doubled = int((clicks * (2 * others_below + others)).sum())
    return doubled / (2 * num_pairs)

"""Row gradients as tensors, without process groups: summed by row, looked up, applied."""

"""Row gradients: captured instead of applied, merged over ranks, applied once."""

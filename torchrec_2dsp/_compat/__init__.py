"""Adapters to internals of TorchRec, FBGEMM and torch, which only they import; version checks."""

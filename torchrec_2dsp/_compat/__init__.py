"""The only importer of TorchRec and FBGEMM internals."""

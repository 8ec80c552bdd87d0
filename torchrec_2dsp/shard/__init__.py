"""Running a plan: sharders, sharded modules and their kernels."""

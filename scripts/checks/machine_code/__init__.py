"""Machine code that compilers make of the attention kernels, for GPUs that are not here: scripts/machine_code."""

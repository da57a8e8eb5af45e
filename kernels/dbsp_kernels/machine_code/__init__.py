"""What compilers make of the attention kernels, for GPUs that are not here: `python -m dbsp_kernels.machine_code`."""

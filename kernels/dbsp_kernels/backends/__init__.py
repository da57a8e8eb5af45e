"""A file per kernel: what `dbsp_kernels.kernel` lists."""

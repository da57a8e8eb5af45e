"""One file per kernel; `dbsp_kernels.kernel` has the table."""

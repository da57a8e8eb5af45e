"""The kernels that are not our own Triton ones: one file each, registered in `dbsp_kernels.registry`."""

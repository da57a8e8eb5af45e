"""The kernels, one file each, with what each can do: its `KERNEL`; `dbsp_kernels.registry` lists them."""

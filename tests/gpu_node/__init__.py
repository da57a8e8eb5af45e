"""A simulated GPU node: several CUDA devices in one process on a machine without any, for tests.

- `tensors.py`, `factories.py`: tensors say cuda:N and hold CPU values; devices that are mixed, or host and device, are
  an error.
- `launches.py`: Triton launches run in the interpreter, and are rejected where CUDA would reject them.
- `streams.py`: streams and events; what one stream uses of another without a wait between them is an error.
- `faults.py`: counts of host waits (with file and line), launches, operators and compiled variants.
- `cuda_api.py`: `torch.cuda`. `device_runtime.cpp`, `runtime.py`: what torch's C++ asks a runtime for.
- `ranks.py`: ranks that are threads, each on its own device, over groups in memory that behave like NCCL and gloo.
- `node.py`: the process with the devices, to which tests send functions.
- `process_groups.py`: NCCL between processes, over gloo. `processes.py`: ranks that are processes, to which tests send
  functions.

Autograd runs with torch's own engine, a thread per device. Not simulated: time, the caching allocator's reuse of
memory, CUDA graphs, and what the compiler makes of a kernel (`tests/kernels/test_machine_code.py` reads that).
"""

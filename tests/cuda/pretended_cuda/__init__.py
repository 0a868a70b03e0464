"""A CUDA device that is not there, for tests: tensors that say they are on cuda:0 and compute on the CPU.

    PYTHONPATH=tests/cuda python -m pytest -p pretended_cuda.plugin ...

It has the manners of CUDA:

- Operands on two devices raise. A number of the CPU may join.
- Every wait for the device is counted with the line of the project that asked for it (`DEVICE.waits`). Copies out of
  pageable memory wait; copies out of pinned memory do not if they are not blocking, and then that memory must stay
  unchanged until the next wait.
- `torch.cuda.graph` records operations: backward passes, optimizers, random numbers of the device's generator and
  launches of Triton's kernels. While it records, waits and copies from the host raise. What was recorded is void until
  the first replay.
- The device has a generator and memory statistics of its own.

It needs a torch for the CPU and a C++ compiler (`library.missing`). Triton's kernels run in its interpreter. Arithmetic
is the CPU's, so it finds faults of placement, waiting, recording and order, not of rounding, races or speed.
"""

"""The library of the CUDA kernels: builds it, finds it, loads it, and calls it through its C ABI.

Owns: how `kernels/cuda/**/*.cu` become a shared library (nvcc for GPUs; g++ and the emulator for
tests without one), the C view of a tensor, refusals and launch failures as exceptions.
Gives: `kvkernels.cuda.library`, also a program that builds it. This `__init__` imports nothing.
Never imports: torch; anything else of this project.
Start reading at: `library.py`, then `docs/kernels.md`.
"""

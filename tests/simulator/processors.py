"""The ways in which a processor can compute sums: with OpenBLAS's different kernels, and without
numpy's vector code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# The kernels of numpy's and scipy's wheels, and the flags of /proc/cpuinfo that each one needs.
# OpenBLAS does not check the named kernel: on another processor the process dies.
AVX512 = frozenset(("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"))
KERNELS = {
    "Prescott": frozenset(("pni",)),
    "Nehalem": frozenset(("sse4_2",)),
    "Sandybridge": frozenset(("avx",)),
    "Haswell": frozenset(("avx2", "fma")),
    "Zen": frozenset(("avx2", "fma")),
    "SkylakeX": AVX512,
    "Cooperlake": AVX512 | {"avx512_bf16"},
}
NO_AVX512, NO_VECTORS = "numpy without AVX-512", "numpy without AVX-512 and FMA"
WAYS = (*KERNELS, NO_AVX512, NO_VECTORS)


def environment(way: str) -> dict[str, str] | str:
    """Return the environment variables that make a process compute in this way, or, as text, why
    this processor cannot.
    """
    if way in KERNELS:
        missing = sorted(KERNELS[way] - _processor_flags())
        if missing:
            return f"this processor cannot run OpenBLAS's {way}: it lacks {', '.join(missing)}"
        return {"OPENBLAS_CORETYPE": way}
    features = numpy_features()
    if way == NO_AVX512:
        features = [name for name in features if "AVX512" in name or name == "X86_V4"]
    if not features:
        return f"{way} is what this processor has"
    # The C library's `exp`, `log` and `pow` have variants of their own.
    library = "-AVX512F" if way == NO_AVX512 else "-AVX512F,-AVX2,-FMA,-FMA4"
    return {
        "NPY_DISABLE_CPU_FEATURES": " ".join(features),
        "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={library}",
    }


def numpy_features() -> list[str]:
    """Return the names of the processor's vector units for which numpy chooses other code at run
    time.
    """
    script = (
        "import json, numpy._core._multiarray_umath as m;"
        "print(json.dumps([f for f in m.__cpu_dispatch__ if m.__cpu_features__.get(f)]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    features: list[str] = json.loads(done.stdout)
    return features


def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, ()))

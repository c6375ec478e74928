"""Native building blocks for prefix-aware routing.

Owns: chain hashes (XXH3-64 over token blocks) and the index of which worker holds which block.
Gives: `chain_hashes`, `PrefixIndex`; `NATIVE` says whether the C++ build or the plain-Python
twins (same answers, slower) are in use.
Never imports: anything else of this project, torch.
Start reading at: `twins.py`, which states in Python what the C++ in `kernels/src/` does fast.
"""

try:
    from kvkernels._native import PrefixIndex, chain_hashes

    NATIVE = True
except ImportError:  # no compiler at install time: the twins answer the same
    from kvkernels.twins import PrefixIndex, chain_hashes  # type: ignore[assignment]

    NATIVE = False

__all__ = ["NATIVE", "PrefixIndex", "chain_hashes"]

"""The seed that starts a chain, as `kvkernels` computes it of events."""

from kvkernels.seeds import chain_seed

__all__ = ["chain_seed"]

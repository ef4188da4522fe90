"""The documented names of NVIDIA NeMo AutoModel's gemma4_moe.cp_attention and cp_local_ring, on top
of this library: a NeMo user swaps an import.

    from ringattn.nemo import cp_attention, cp_local_ring
"""

from ringattn.nemo import cp_attention, cp_local_ring

__all__ = ["cp_attention", "cp_local_ring"]

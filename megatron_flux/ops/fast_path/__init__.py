"""A cache of the ordinary path: calls that have been made before are made without deciding anything anew.

``call_cache`` finds a prepared call by all it depends on; ``replay`` makes it; the kernel itself is launched by
:mod:`megatron_flux.kernels.launch`.
"""

"""Ways to run the operators. Read ``registry`` (what a backend is, which one runs a call), ``reference`` (torch's own),
``fused``, and ``tuned`` (:mod:`megatron_flux.ops.tuner`).
"""

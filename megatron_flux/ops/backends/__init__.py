"""Ways to run the operators. Read ``registry`` (what a backend is, which one runs a call), ``reference`` (torch's own:
stock, and ``pipelined``), ``fused``, and ``tuned`` (:mod:`megatron_flux.ops.tuner`).
"""

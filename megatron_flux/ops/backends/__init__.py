"""Ways to run the operators. Read ``registry`` (which one runs a call: ``auto`` is ``tuned`` over NVLink, host memory
and, if asked for, p2p, else ``reference`` with the reason counted), ``reference`` (torch's own, anywhere), ``fused``
(NVLink), ``chunked`` (other links), and ``tuned`` (the fastest of these, :mod:`megatron_flux.ops.tuner`).
"""

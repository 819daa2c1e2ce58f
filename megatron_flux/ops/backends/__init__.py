"""Ways to run the operators. Read ``registry`` (what a backend is, which one runs a call), ``reference`` (torch's own:
stock, and ``pipelined``), ``fused``, ``tuned`` with its file in ``tuning_cache``.
"""

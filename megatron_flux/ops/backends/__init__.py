"""Ways to run the operators. Read ``base`` (what each of them is), ``registry`` (which one runs a call), ``reference``
(stock), ``async_tp`` (torch's, named ``pipelined``), ``fused``, ``tuned`` with its file in ``tuning_cache``.
"""

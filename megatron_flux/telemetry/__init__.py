"""Measurements beside a run. Imports nothing above ``metrics``, ``patch``, ``layers`` and ``ops``.

Modules: ``environment`` (versions, devices and links of this machine, and if flux can run here), ``call_sampler``
(times of operator calls every n-th step, compared with their GEMMs), ``profiler`` (traces of a few steps),
``breakdown`` (where the time in a trace went).
"""

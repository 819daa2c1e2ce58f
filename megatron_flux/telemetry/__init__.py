"""What is measured beside a run. Imports nothing above ``metrics``, ``patch``, ``layers`` and ``ops``.

To read: ``environment`` (versions, devices and links of this machine, and whether flux can run here), ``call_sampler``
(what operator calls take, every so many steps, and what that says about overlap), ``profiler`` (traces of a few steps,
also of all ranks in one), ``breakdown`` (what each event in a trace is, and where the steps' time went).
"""

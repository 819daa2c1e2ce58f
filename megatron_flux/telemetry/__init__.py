"""What is measured beside a run. Imports nothing above ``metrics``, ``patch``, ``layers`` and ``ops``.

To read: ``environment`` (versions, devices, links of this machine) and ``doctor`` (whether flux can run here, for the
command and the pre-flight of jobs); ``call_sampler`` (what operator calls take, every so many steps) and
``baseline_times`` (what they are compared with); ``profiler`` (traces of a few steps), ``trace_categories`` (what each
event in a trace is), ``trace_parts`` (where the steps' time went), ``trace_merge`` (all ranks in one trace).
"""

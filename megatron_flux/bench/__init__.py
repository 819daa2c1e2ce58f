"""Benchmarks: operators (``bench ops``, ``bench peers``, ``tune``) and transformer layers (``bench layer``).

The commands start them, and :mod:`megatron_flux.run.rank` runs them on every rank.

* ``options``: options and checked runs. ``cases``: operator calls and layers of a model.
* ``harness``: cases by variants in interleaved rounds, run folder, process groups. The timer is ops/timing.
* ``calls``: operands, stock's and flux's runs on them. ``ops``, ``tune``: operator calls.
* ``peers``: operator calls of every project that has them. ``arms``: these projects.
* ``layer``: layers. ``variants``, ``no_communication``: what is compared. ``correctness``: whether results agree.
* ``tables``: what people see.
"""

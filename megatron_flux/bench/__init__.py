"""Benchmarks: operators (``bench ops``, ``bench peers``, ``tune``) and transformer layers (``bench layer``).

``harness`` measures cases by variants in interleaved rounds, with the timer of ops/timing. ``variants`` and
``no_communication`` are what ``layer`` compares, ``arms`` what ``peers`` does.
"""

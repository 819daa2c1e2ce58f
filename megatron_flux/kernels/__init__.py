"""Triton and Gluon kernels and their launch. Nothing here knows process groups or autograd.

Read :mod:`~megatron_flux.kernels.device` first (flags, bounded waits), then ``plain`` (the schedules, for every GPU and
for Triton's interpreter), then ``hopper/pieces``, ``hopper/ag_gemm`` and ``hopper/gemm_rs`` (the same with specialised
warps), and ``launch`` for what a launch costs on the host.

``wire`` has the 8-bit formats of slower links.

Importing a module of this package, other than ``signals``, ``wire`` and ``wire_format``, imports triton.
"""

"""Triton kernels. This room knows neither process groups nor autograd; only :mod:`megatron_flux.ops` imports it, late.

Importing a module of this package imports triton.
"""

"""Launching the fused kernels: plain.py for all GPUs, hopper.py for the warp-specialised ones."""

"""From operands to launched kernels: operands.py (what a call is made of), plain.py (a call from beginning to end, and
the kernels for all GPUs), hopper.py (the warp-specialised kernels).
"""

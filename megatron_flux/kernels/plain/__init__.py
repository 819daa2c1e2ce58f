"""The fused kernels in Triton, for all GPUs and for Triton's interpreter."""

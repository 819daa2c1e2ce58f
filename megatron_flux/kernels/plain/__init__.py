"""The fused kernels in Triton, for all GPUs and for Triton's interpreter: ag_gemm.py and gemm_rs.py."""

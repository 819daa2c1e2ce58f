"""The fused kernels for Hopper in Gluon, with specialised warps: read pieces.py, then ag_gemm.py and gemm_rs.py."""

"""The fused kernels for Hopper in Gluon, warp-specialised. Read pieces.py first, then ag_gemm.py and gemm_rs.py."""

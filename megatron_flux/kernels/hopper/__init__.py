"""The fused kernels for Hopper in Gluon: warp-specialised, TMA and wgmma."""

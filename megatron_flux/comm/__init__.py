"""Moving tensors between the ranks of a process group. This room knows no GEMM."""

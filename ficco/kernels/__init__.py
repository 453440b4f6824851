"""Kernels in Triton, one subject a file. They run on a GPU, or under Triton's interpreter."""

"""Triton kernels, one subject per file. They run on a GPU or under Triton's interpreter."""

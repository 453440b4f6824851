"""Making the pack of compiled kernels: which variants are in it, and the files themselves."""

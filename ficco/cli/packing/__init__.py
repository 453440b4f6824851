"""Building the pack of compiled kernels: the set of variants, and the files."""

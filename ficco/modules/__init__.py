"""Front ends for PyTorch, one process per rank. Loaded when first used."""

"""Tensor-parallel layers of models: one parallel style a file, and what they share."""

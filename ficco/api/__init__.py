"""What users call: a node of NumPy or CuPy arrays, and PyTorch functions and models.

Modules are loaded when one of their names is first used.
"""

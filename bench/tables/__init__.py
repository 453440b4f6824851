"""The tables of README.md and bench/RESULTS.md, from bench/results. It does not import torch."""

"""Measuring a machine: its GEMMs, links, words and costs, and the profile that is written of them.

`gpu` has one part a module, each for all ranks of a machine with GPUs; `host` measures the host
engine. What points are measured, what is worked out from them and how it is written stands beside.
"""

"""Measure a machine's GEMMs, links, signals and costs, and write them as a profile.

`gpu` measures the GPUs of a machine, with one module per part; `host` measures the host engine. The
other modules choose the points to measure, evaluate the times and write the profile.
"""

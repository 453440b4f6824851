"""Measuring GPUs, a process each: one part of a profile a module, and `profile`, which runs all.

Every part is made by all ranks together, in the same order, and returns plain data that is equal on
all of them. Times are of the device, within replayed CUDA graphs, unless a part says otherwise.
"""

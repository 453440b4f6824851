"""Measure GPUs, with one process per GPU; `profile` runs all parts of the other modules.

All ranks run every part together, in the same order. A part returns plain data that are equal on
all ranks. Times are device times within replayed CUDA graphs, unless a part says otherwise.
"""

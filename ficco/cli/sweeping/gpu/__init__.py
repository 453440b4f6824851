"""Sweeps on GPUs, with one process per GPU; `ficco.measure` times the shapes.

    session     the launcher's side: starts and restarts the ranks, writes the journal
    rank        the process of one rank

`session` does not import torch.
"""

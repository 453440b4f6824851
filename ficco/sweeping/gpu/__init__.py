"""Sweeps on GPUs, with one process per GPU; `ficco.measuring` times the shapes.

    session     the launcher's side: starts and restarts the ranks, writes the journal
    worklist    the ranks' input
    rank        the process of one rank

`session` and `worklist` do not import torch.
"""

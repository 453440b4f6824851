"""Measure schedules on GPUs, with one process per GPU; the ranks synchronize before every run.

    session     the launcher's side: starts and restarts the ranks, writes the journal
    worklist    the ranks' input
    launching   starts the processes, bounds their time, ends them; the rendezvous page
    rank        the process of one rank
    joining     a process joins the group, and leaves with it
    measuring   one shape on a rank: check, capture, time
    timing      times one configuration in one regime
    layout      the shapes of a rank's tensors
    operands    the tensors, every way to run them, and the reference results
    pieces      a schedule's GEMMs without its copies

`session`, `worklist`, `layout` and `launching` do not import torch.
"""

"""Timing of schedules, by commands and by sweeps: one process per rank, or one per GPU.

    executors   run a command's problem as one rank of a group of processes
    launching   starts one process per GPU, bounds their time, ends them; the rendezvous page
    ranks       a process joins the group, and leaves with it
    rounds      one shape on a rank: check, capture, time
    clock       times one configuration in one regime; the time of calls on a GPU
    host_clock  the time of calls on the host
    layout      the shapes of a rank's tensors
    cases       the tensors, every way to run them, and the reference results
    parts       a schedule's GEMMs without its copies

`host_clock`, `launching` and `layout` do not import torch.
"""

"""Measuring schedules on GPUs: a process each, started here, that meet before every run.

    measure     the sweep's side of it: starts ranks, keeps the journal, starts them anew
    todo        what ranks are told
    launching   processes started, bounded, never left behind; how they meet
    rank        the process of one rank
    joining     a process joins the others, and leaves with them
    measuring   a shape under way on a rank: checked, captured, timed
    timing      one configuration in one regime
    layout      what a rank holds of a shape
    operands    its tensors, every way to run them, and what is right
    pieces      a schedule's GEMMs without its copies

`measure`, `todo`, `layout` and `launching` need no torch.
"""

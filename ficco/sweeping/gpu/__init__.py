"""Measuring schedules on GPUs: a process each, started here, that meet before every run.

layout      a rank's tensors of an evenly split shape    operands    the tensors, and ways to run
launching   processes started, bounded, never left       joining     a process joins the others
timing      one configuration in one regime              measuring   a shape under way on a rank
rank        the process of one rank                      measure     the sweep's side of it all
"""

"""Sweeps: many schedules on many shapes, measured here or simulated, in a folder worth keeping.

    grid      what a grid's file says                 points     the shapes and points it stands for
    folder    a sweep's folder, its head and lock     journal    what was measured, line by line
    results   results and CSV, from the journal       booking    a book, from the results
    running   all of it in order; `simulated`, `host` and `gpu` are what measures

A measurement is written down as it comes and never made again, so a sweep goes on where it ended.
"""

"""Sweeps: measure or simulate many schedules on many shapes, and store the results in a folder.

    grid      reads a grid's file                     points     expands a grid to shapes and points
    folder    a sweep's folder, its head and lock     journal    the measurements, one per line
    results   results, CSV and a book, from the journal
    running   runs a whole sweep; `simulated`, `host` and `gpu` measure

Each measurement is written at once and never repeated, so a sweep continues where it ended.
"""

"""The tables of README.md and bench/RESULTS.md, made from bench/results. Needs no torch."""

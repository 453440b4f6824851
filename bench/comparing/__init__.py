"""The parts of compare.py: cases, configurations, timing and results."""

"""The parts of compare.py: cases, what is compared on them, how it is timed, what is written."""

"""The pages that bench/readme.py writes, one a file. Each has a function that returns its text."""

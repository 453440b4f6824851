"""Tables for the pages of docs/performance, from bench/results. Nothing here imports torch."""

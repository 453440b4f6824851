"""Runtimes: who holds windows and bound programs. `local` has all ranks in this process."""

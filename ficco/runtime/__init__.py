"""Runtimes: who holds windows and bound plans. `local` has all ranks in this process."""

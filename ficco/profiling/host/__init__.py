"""Measuring the host engine as it is, unpaced: all ranks of one process, on this machine's cores.

Steps are timed as the engine itself runs them, by plans made for it (`rig`); GEMMs by as many
threads as there are ranks, which is how ranks share the cores when they compute.
"""

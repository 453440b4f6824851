"""Measuring the host engine as it is, unpaced: ranks that share this machine's cores.

Steps are timed as the engine itself runs them, by plans made for it, on a rig: ranks that are
threads of this process (`threads`) or processes of a group (`processes`).
"""

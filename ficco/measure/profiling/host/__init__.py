"""Measure the host engine unpaced, with ranks that share this machine's cores.

The engine itself runs and times the steps of hand-made plans on a rig: ranks that are threads of
this process (`threads`) or processes of a group (`processes`).
"""

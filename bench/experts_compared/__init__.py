"""Mixtures of experts on several ranks, in ficco and in PyTorch. For moe.py."""

"""Engines execute plans. Only they import the native module."""

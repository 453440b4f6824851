"""Engines execute plans. They alone import the native layer."""

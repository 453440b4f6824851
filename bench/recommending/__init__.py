"""The parts of dlrm.py: shapes, the model, ways to look up and update tables, measurement."""

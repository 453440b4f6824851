"""The parts of model.py: the model, cells and variants, measurement on a rank, tables."""

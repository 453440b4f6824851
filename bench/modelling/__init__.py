"""The parts of model.py: the model, cells and variants, how a rank measures, the README table."""

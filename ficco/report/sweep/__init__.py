"""The page of a sweep: reading the folder, evaluation, plots and layout."""

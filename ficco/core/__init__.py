"""What all rooms use: errors, checks, files, settings, machines and their costs."""

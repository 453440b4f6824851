"""Commands. They read arguments, call the rooms below, and print."""

"""The commands: they parse arguments, call the library, and print."""

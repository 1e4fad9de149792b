"""The tasks: a file each, and the functions that they name."""

"""The command line: one module per command, which parses options, calls the code that does the work, and prints."""

"""Pure: the same history in, the same decision out. No process, no file, no clock."""

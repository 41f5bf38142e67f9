"""What can be asked for: every option is declared here once, read, and checked against the others."""

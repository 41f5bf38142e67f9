"""The answer in the formats of other training programs, one file each."""

"""The answer in the words of other training programs, one file each."""

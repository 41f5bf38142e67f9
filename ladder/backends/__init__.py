"""Backends, which train engines: their configuration and the formulas for memory and time, one package each."""

"""Tables and figures of a run. Figures are plain data in some modules and are drawn in others."""

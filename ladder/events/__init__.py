"""The events that ranks report, and the outcomes that follow from them."""

"""The optimizers that can be tuned for, one file each: what one keeps for a weight, where it trains, and its words."""

"""Training without DeepSpeed, through accelerate: DDP and FSDP2."""

"""How published quantized checkpoints lay out their codes, a module a method."""

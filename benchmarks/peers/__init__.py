"""The engines that benchmarks/peers.py compares: how each is installed, and one script each that runs the work."""

"""What runs on the device, and the host side that feeds it."""

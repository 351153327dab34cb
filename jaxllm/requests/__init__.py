"""What a caller may ask for, and what comes back."""

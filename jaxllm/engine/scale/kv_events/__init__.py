"""What an engine tells others about its prefix cache."""

"""Who may call, what they may do, and what they have used."""

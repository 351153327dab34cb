"""Routes and files in other servers' own words, which the application alone knows."""

"""Files that a stranger wrote: mutants of tiny valid ones, drawn from a seed. Each loads, or is refused in one line."""

"""The game: a challenger poses questions, a solver with cards answers them, and both learn from how it went."""

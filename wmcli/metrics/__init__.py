"""Scores and their statistics: pure functions, no models, no torch."""

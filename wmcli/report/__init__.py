"""Pictures for people: frames side by side, curves, histograms. Knows no models and imports no torch."""

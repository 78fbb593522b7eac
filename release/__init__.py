"""What makes a release: image, chart, wheels, and what goes with them. `make release` runs it."""

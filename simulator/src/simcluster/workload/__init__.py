"""What runs in simulated containers: images of the seed documents as local programs that behave alike."""

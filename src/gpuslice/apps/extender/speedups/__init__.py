"""What only saves time: without this folder the same pods get the same cards, later."""

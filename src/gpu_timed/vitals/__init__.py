"""What state the machine was in: clocks, throttling, power and load, read in the background."""

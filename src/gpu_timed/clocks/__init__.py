"""Where time comes from: clocks that place marks, and locators that say where."""

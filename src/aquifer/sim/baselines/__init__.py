"""Memory managers that the replay compares Aquifer's with."""

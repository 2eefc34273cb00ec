"""From a checkpoint on disk to parameters in pool pages."""

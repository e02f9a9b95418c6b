"""What to serve a model with on this CPU: the engines that there are, timed in turn."""

"""Token classification: the shortest task."""

"""Token classification, such as named entity recognition."""

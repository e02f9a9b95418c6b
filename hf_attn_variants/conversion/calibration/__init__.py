"""Text, or audio, through the source model; a tenth of it is held out before anything is fitted."""

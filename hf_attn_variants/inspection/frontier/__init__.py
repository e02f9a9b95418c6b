"""What variants of a checkpoint take and what they lose, in memory."""

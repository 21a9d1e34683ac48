"""Execute schedules in CPU processes."""

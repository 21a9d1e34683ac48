"""Execute schedules on GPUs."""

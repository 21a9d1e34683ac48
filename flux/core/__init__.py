"""The layer under all others: ops, schedules, topology, environment variables, data files."""

"""Rules whose texts follow the target's law exactly."""

"""Rules whose texts follow the target's distribution exactly."""

"""A target whose weights are split over several processes: tensor parallelism."""

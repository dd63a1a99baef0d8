"""Plans fleets: how many workers and hosts a load needs, by simulation with the costs of a calibration."""

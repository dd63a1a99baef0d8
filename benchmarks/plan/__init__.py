"""Plans of fleets beside what the fleets do."""

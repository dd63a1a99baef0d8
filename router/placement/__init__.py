"""Chooses the worker for a request: prefix index, predictions, bookings, policy. No I/O."""

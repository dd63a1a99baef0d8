"""Which worker a request goes to: prefix index, predictions, bookings, policy. No I/O."""

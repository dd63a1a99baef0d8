"""Which models a host serves, and when each is loaded: decided here, without starting a process."""

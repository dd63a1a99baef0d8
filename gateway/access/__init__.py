"""Authentication and limits of callers: keys, rate limits, quotas, admission."""

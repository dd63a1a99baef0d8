"""What happens to a request: admission, the queue, forwarding, resumption, refusals."""

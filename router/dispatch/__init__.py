"""The path of a request through the router: admission, queue, forwarding, resumption, refusals."""

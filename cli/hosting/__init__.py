"""The models of one host: how they are described, which of them are loaded, and the service that loads them."""

"""The gateway's client of routers, and the bundles that workers hand out through them."""

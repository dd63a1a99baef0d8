"""The gateway's client of routers, and the tokenizer bundles that come through them."""

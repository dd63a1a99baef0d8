"""An endpoint picker for proxies: places their requests by the router's index (Gateway API Inference Extension)."""

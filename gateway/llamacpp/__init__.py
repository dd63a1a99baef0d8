"""The endpoints of llama.cpp's server that OpenAI's API does not have: completions, infills, templates, properties."""

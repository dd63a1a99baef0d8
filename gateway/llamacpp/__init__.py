"""The API of llama.cpp's server, besides what it shares with OpenAI's: completions, infills, templates, properties."""

"""Images of vision-language models: their headers, their bounds, their identity, how they lengthen a prompt, and the
pixels that a vision tower reads. Gateway and worker share it; only the worker decodes."""

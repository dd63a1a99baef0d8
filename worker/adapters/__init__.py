"""LoRA adapters: their files, and which of them are in memory."""

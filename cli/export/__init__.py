"""Export checkpoints in safetensors form to OpenVINO models."""

"""Models: built on the meta device, initialized or loaded, exported. Uses transformers and peft."""
